"""Rewards: formulas that have a name, functions of the user's own in both signatures, and what goes wrong in them."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megalith.errors import ConfigError, DataError
from megalith.launch.signals import StopSignals
from megalith.rl.rewards.rewards import Rewards, reward_function
from megalith.rl.rollouts.prompts import Prompt


def prompt(text="p", messages=None, **columns) -> Prompt:
    return Prompt("q1", [1], text, messages, columns, "p.jsonl, line 1")


# fmt: off
GRADED = [
    ("gsm8k", "so 70+2\n#### 1,072", dict(answer="Half…\n#### 1,072"), 1.0),
    ("gsm8k", "#### 5 no\n#### 72", dict(reward_model={"ground_truth": "72"}), 1.0),
    ("gsm8k", "it is 72", dict(answer="#### 72"), 0.0),
    ("gsm8k", "#### 72.0", dict(answer="#### 72"), 0.0),  # strict: as strings
    ("gsm8k", "#### 72", dict(answer=72.0), 1.0),  # a column of numbers, as parquet has it
    ("gsm8k", "#### 1,072", dict(answer=1072.0), 1.0),
    ("gsm8k", "#### 0.50", dict(reward_model={"ground_truth": 0.5}), 1.0),
    ("gsm8k", "#### 71", dict(answer=72.0), 0.0),
    ("gsm8k_flexible", "it is 72.0, I think", dict(answer="#### 72"), 1.0),
    ("gsm8k_flexible", "it is 72, or 73", dict(answer="#### 72"), 0.0),
    ("arithmetic", "12", dict(answer=12), 1.0),
    ("arithmetic", "-12", dict(answer=12), 0.0),
    ("arithmetic", "", dict(answer=12), 0.0),
    ("arithmetic", "13-12", dict(answer=12), 1.0),
    ("arithmetic", "13-12", dict(answer=-12), 0.0),
    ("arithmetic", "13 - -12", dict(answer=-12), 1.0),
    ("arithmetic", "(3)-12", dict(answer=12), 1.0),
    ("arithmetic", "1,2", dict(answer=12), 0.0),
    ("arithmetic", "1,2", dict(answer=2), 1.0),
    ("arithmetic", "it is 1,234,567.5.", dict(answer="1234567.5"), 1.0),
    ("arithmetic", "1,234,56", dict(answer="56"), 1.0),
    ("arithmetic", "9007199254740993", dict(answer="9007199254740992"), 0.0),  # equal as floats
    ("arithmetic", "x = .5", dict(answer=0.5), 1.0),
    ("arithmetic", "x = -.5", dict(answer=5), 0.0),
    ("arithmetic", "about 1e3", dict(answer=1000), 1.0),
    ("arithmetic", "about 2.5e-3", dict(answer="0.0025"), 1.0),
    ("arithmetic", "about 1e3", dict(answer=3), 0.0),
    ("arithmetic", "room 1e3b", dict(answer=3), 1.0),  # no number, but two
    ("arithmetic", "x = \N{MINUS SIGN}3", dict(answer=-3), 1.0),
    ("arithmetic", "x = \N{MINUS SIGN}3", dict(answer=3), 0.0),
    ("arithmetic", "10\N{MINUS SIGN}3", dict(answer="3"), 1.0),
    ("arithmetic", "-3", dict(answer="\N{MINUS SIGN}3"), 1.0),
    ("countdown", "<answer>-3 + 27</answer>", dict(target=24, nums=[3, 27]), 1.0),
    ("countdown", "<answer>-(3 - 27)</answer>", dict(target=24, nums=[3, 27]), 1.0),
    ("countdown", "<answer>~3 + 27</answer>", dict(target=23, nums=[3, 27]), 0.0),
    ("countdown", "first\n<answer>(7 - 3) * 25</answer>", dict(target=100, nums=[3, 7, 25]), 1.0),
    ("countdown", "<answer>25 * 4</answer>", dict(target=100, nums=[3, 7, 25]), 0.0),
    ("countdown", "<answer>7 + 7</answer>", dict(target=14, nums=[7]), 0.0),
    ("countdown", "<answer>__import__('os')</answer>", dict(target=1, nums=[]), 0.0),
    ("countdown", "<answer>9**9**9</answer>", dict(target=1, nums=[9, 9, 9]), 0.0),
    ("countdown", "<answer>1/0</answer>", dict(target=1, nums=[1, 0]), 0.0),
    ("format", "<think>a</think>\n<answer>b</answer>", {}, 1.0),
    ("format", "<answer>b</answer><think>a</think>", {}, 0.0),
    ("length", "", {}, 0.7),
    ("length", "", dict(length=6), 0.5),
    ("length", "", dict(length=1), 0.0),
]
# fmt: on


@pytest.mark.parametrize(("name", "text", "columns", "worth"), GRADED)
def test_a_named_reward_gives_what_its_formula_says(name, text, columns, worth):
    assert reward_function(name).function(text, prompt(**columns), [1, 2, 3], 10) == pytest.approx(worth)


CHAT = [{"role": "user", "content": "Sort:\n9,3,7"}]


@pytest.mark.parametrize(
    "asked",
    [
        prompt("sort these:\n9 3 7"),
        prompt("9,3,7\n"),
        prompt("Sort: 9, 3, 7."),
        prompt("<user>…\n<assistant>", CHAT),
    ],
)
def test_sort_counts_the_places_that_are_right(asked):
    found = [
        reward_function("sort").function(text, asked, [], 10)
        for text in ("3 7 9", "3,7,9", "3 9 7", "9,3,7", "3 7 9 9", "")
    ]
    assert found == [1.0, 1.0, pytest.approx(1 / 3), 0.0, 0.75, 0.0]


def test_sort_takes_numbers_below_0_and_of_three_digits():
    assert reward_function("sort").function("-10,-3,100,200", prompt("200,-3,100,-10"), [], 10) == 1.0


@pytest.mark.parametrize(
    ("question", "answer"),
    [("1 .5 -.5", "-.5 .5 1"), ("1e3,2,1e2", "2, 100, 1000"), ("1, \N{MINUS SIGN}3", "\N{MINUS SIGN}3, 1")],
)
def test_sort_reads_numbers_however_they_are_written(question, answer):
    rewards = [
        reward_function("sort").function(text, prompt(question), [], 10) for text in (answer, question)
    ]
    assert rewards[0] == 1.0 > rewards[1]


HUGE = {
    "signs": "-" * 5000 + "7",
    "factors": "*".join(["9" * 4000] * 400),
    "sums": "+".join("1" * 30_000),
    "brackets": "(" * 20_000 + "7" + ")" * 20_000,
    "powers": "9" * 5000,
    "tags": "<answer>" * 20_000,
}


@pytest.mark.parametrize("what", HUGE)
def test_a_huge_formula_of_countdown_takes_no_time(what):
    function, text, seconds = reward_function("countdown").function, f"<answer>{HUGE[what]}</answer>", []
    for _ in range(3):  # the shortest of three has no pause of the interpreter
        began = time.process_time()
        assert function(text, prompt(target=7, nums=[7]), [], 10) == 0.0
        seconds.append(time.process_time() - began)
    assert min(seconds) < 0.5


VERIFIED = [
    (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
    (r"$\frac{2}{4}$", "1/2", 1.0),
    (r"\boxed{1+x}", "$x + 1$", 1.0),
    (r"\boxed{3} no, \boxed{4}", r"… so \boxed{4}", 1.0),
    (r"\boxed{4} no, \boxed{3}", "4", 0.0),
    ("The answer is 1,072.", "Half…\n#### 1072", 1.0),
    ("no idea", "4", 0.0),
    (r"\boxed{9^{9^{9^9}}}", "4", 0.0),
    ("4", "", np.nan),
]


def test_math_verify_compares_formulas_and_a_library_that_is_missing_is_named(monkeypatch):
    pytest.importorskip("math_verify")
    asked = [Prompt(n, [1], "p", None, {"answer": answer}) for n, (_, answer, _) in enumerate(VERIFIED)]
    judge = Rewards(["math_verify"], asked, max_tokens=10, workers=1)
    found = judge([(n, [text], [[1]]) for n, (text, *_) in enumerate(VERIFIED)])
    judge.close()
    np.testing.assert_equal([rows[0, 0] for rows in found.rewards], [worth for *_, worth in VERIFIED])
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"needs the math-verify package; run: pip install .*\[math\]"):
        Rewards(["math_verify"], asked, max_tokens=10)


def test_a_missing_column_is_named(tmp_path):
    with pytest.raises(DataError, match=r"line 1 has no column 'answer', only x; correct the data, or"):
        Rewards(["gsm8k"], [prompt(x=1)], max_tokens=10)([(0, ["#### 1"], [[1]])])


GROUP = (0, ["a", "bb"], [[5], [6, 7]])


def rewards(*functions, timeout=10.0, workers=2, asked=None) -> Rewards:
    given = dict(max_tokens=10, timeout=timeout, workers=workers)
    return Rewards(functions, [asked or prompt(answer=3)], **given)


def test_both_signatures_async_logs_and_absent_rewards_in_processes_of_their_own(tmp_path):
    seen = {}

    def trl(prompts, completions, completion_ids, answer, trainer_state, log_metric, log_extra):
        seen["here"] = True  # a closure, in another process
        log_metric("answers", sum(answer))
        log_extra("upper", [text.upper() for text in completions])
        return [trainer_state.global_step + len(ids) for ids in completion_ids]

    async def later(completions, **columns):
        await asyncio.sleep(0)
        return [None, np.float32(0.5)]

    (tmp_path / "own.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': len(solution_str) + ground_truth, 'acc': 1.0}\n"
    )
    judge = rewards(trl, later, "length", f"{tmp_path}/own.py:compute_score")
    found = judge([GROUP, GROUP], step=4)
    judge.close()
    assert judge.names == ["trl", "later", "length", "compute_score"] and not seen
    for rows in found.rewards:
        np.testing.assert_allclose(rows, [[5, np.nan, 0.9, 4], [6, 0.5, 0.8, 5]])
    assert found.metrics == {"answers": [6.0, 6.0], "acc": [1.0] * 4}
    assert found.extras[0] == [{"upper": "A"}, {"upper": "BB"}]


def test_a_reward_changes_over_the_training_by_trls_state():
    def annealed(completions, trainer_state, **columns):
        return [trainer_state.global_step / trainer_state.max_steps] * len(completions)

    judge = Rewards([annealed], [prompt()], max_tokens=10, workers=0, max_steps=8)
    assert judge([GROUP], step=2).rewards[0][:, 0].tolist() == [0.25, 0.25]


def test_a_conversation_is_given_as_messages():
    asked = prompt(messages=[{"role": "user", "content": "hi"}])

    def chat(prompts, completions, **columns):
        assert prompts[0][0]["content"] == "hi"
        return [len(one[0]["content"]) for one in completions]

    assert rewards(chat, workers=0, asked=asked)([GROUP]).rewards[0][:, 0].tolist() == [1, 2]


def raises(completions, **columns):
    return [1 / (len(text) - 2) for text in completions]


def hangs(completions, **columns):
    if "bb" in completions:
        time.sleep(60)
    return [0.0] * len(completions)


def ends(completions, **columns):
    import os

    os._exit(3)


WRONG = {
    "raises": (raises, r"completion 1, 'bb', of prompt q1 \(p.jsonl, line 1\): it raised ZeroDivisionError"),
    "hangs": (hangs, r"completion 1, 'bb', .* did not return within 1 s"),
    "ends": (ends, r"its process ended with exit code 3"),
    "few": (lambda completions, **c: [1.0], r"returned 1 rewards for 2 completions"),
    "text": (lambda completions, **c: ["good", 1], r"returned 'good' for completion 0"),
    "none": (lambda completions, **c: None, r"returned None, not a list"),
    "infinite": (lambda completions, **c: [0, np.inf], r"returned inf for completion 1"),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_reward_that_fails_names_function_and_completion(how):
    function, said = WRONG[how]
    judge = rewards(function, timeout=1.0 if how == "hangs" else 60.0)
    with pytest.raises(DataError, match=said):
        judge([GROUP])
    judge.close()


def in_a_pool(completions, **columns):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(len, completions)


SIGNAL_ITSELF: list[bool] = []  # while not empty, a fork gets SIGTERM before anything else in it runs
os.register_at_fork(after_in_child=lambda: SIGNAL_ITSELF and os.kill(os.getpid(), signal.SIGTERM))


def ended_at_once(completions, **columns):
    SIGNAL_ITSELF.append(True)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    SIGNAL_ITSELF.clear()
    child.join(20)
    return [child.exitcode or 0] * len(completions)


def test_a_signal_reaches_a_reward_s_process_that_has_just_begun():
    with StopSignals(announces=False):
        judge = rewards(ended_at_once, timeout=60.0)
        assert judge([GROUP]).rewards[0][:, 0].tolist() == [-signal.SIGTERM] * 2
        judge.close()


def test_a_reward_may_start_processes_and_they_end_with_it(tmp_path):
    """Also in a run, which takes note of the signal that ends a pool's processes, and goes on."""
    with StopSignals(announces=False):
        judge = rewards(in_a_pool, timeout=60.0)
        assert judge([GROUP]).rewards[0][:, 0].tolist() == [1, 2]
        judge.close()

    def leaves_one(completions, **columns):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=False)
        child.start()
        (tmp_path / "child").write_text(f"{child.pid}")
        time.sleep(600)

    judge = rewards(leaves_one, timeout=1.5, workers=1)
    with pytest.raises(DataError, match=r"did not return within 1\.5 s"):
        judge([GROUP])
    judge.close()
    state = Path(f"/proc/{(tmp_path / 'child').read_text()}/status")
    assert not state.exists() or "zombie" in state.read_text()


@pytest.mark.full
def test_workers_end_with_a_program_that_does_not_close_them(tmp_path):
    program = (
        "from megalith.rl.rewards.rewards import Rewards; from megalith.rl.rollouts.prompts import Prompt\n"
        "judge = Rewards([lambda completions, **columns: [0.0]], [Prompt(0, [1], 'p')], max_tokens=1, workers=2)\n"
        "judge([(0, ['a'], [[1]])])\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=100).returncode == 0


def test_a_process_that_ended_between_two_calls_is_said():
    judge = rewards(lambda completions, **columns: [0.0] * len(completions), workers=1)
    judge([GROUP])
    process = judge._workers[0]._process
    process.kill()
    process.join()
    with pytest.raises(DataError, match="its process ended with exit code -9"):
        judge([GROUP])
    judge.close()


def test_a_function_that_there_is_not_is_refused(tmp_path):
    (tmp_path / "bad.py").write_text("1 / 0\n")
    (tmp_path / "good.py").write_text("x = 1\n")
    for given, said in (
        ("gsm8", r"did you mean"),
        ("none.py:f", "there is no file none.py"),
        (f"{tmp_path}/bad.py:f", "importing it raised ZeroDivisionError"),
        (f"{tmp_path}/good.py:f", "has no function f"),
    ):
        with pytest.raises(ConfigError, match=said):
            rewards(given)


def test_a_reward_that_reads_environments_is_refused():
    def solved(completions, environments, **columns):
        return [one.solved for one in environments]

    with pytest.raises(ConfigError, match=r"solved has the parameter environments, .* get_reward"):
        reward_function(solved)
