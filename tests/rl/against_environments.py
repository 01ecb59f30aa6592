"""Environments of skyrl-gym, reasoning-gym, TextArena and OpenEnv through rl.environment, as the libraries ship them.

    python tests/rl/against_environments.py ENVIRONMENT

makes the virtual environment where it is not there yet, with the four libraries from the package index, and answers
their tasks by scripts that know the answer: every reward is the best. No part of any suite; no task needs a download.
OpenEnv's package has its server and no environment, so a small one is served here.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from threading import Thread

from test_agents import turn_number
from tool_policy import rollouts

LIBRARIES = ("skyrl-gym", "reasoning-gym", "textarena", "openenv-core")
DATASETS = ("basic_arithmetic", "leg_counting", "spell_backward", "number_sorting", "countdown")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("environment", type=Path)
    folder = parser.parse_args().environment
    if not folder.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "-q", *LIBRARIES], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    sys.path.append(str(packages))  # after our own, which it does not replace
    with tempfile.TemporaryDirectory() as temporary:
        for act in (gsm8k_of_skyrl_gym, tasks_of_reasoning_gym, a_game_of_textarena, a_server_of_openenv):
            act(Path(temporary) / act.__name__)


def gsm8k_of_skyrl_gym(folder: Path) -> None:
    """`gsm8k_multi_turn` rewards each step: 0.2 / max_turns for a well-formed wrong answer, 1 for the right one."""
    rows = [
        {"prompt": f"{n} + 3?", "reward_spec": {"ground_truth": str(n + 3)}, "extra_info": {"max_turns": 3}}
        for n in range(3)
    ]

    def second_try(text: str, generation: int) -> str:
        number = int(re.search(r"(\d) \+ 3", text)[1])
        is_second = "tentative numeric answer" in text
        return f"It is\n#### {number + 3 if is_second and generation == 0 else 99}"

    groups, logged, _ = rollouts(
        folder, second_try, environment="skyrl_gym:gsm8k_multi_turn", tools=None, rewards=[], prompts=rows,
        generations=2, max_tokens=2000, tool_workers=2,
    )  # fmt: skip
    right, wrong = zip(*([float(one.rewards[0]) for one in group.completions] for group in groups))
    third = 0.2 / 3
    assert all(abs(one - (third + 1)) < 1e-6 for one in right), right
    assert all(abs(one - 3 * third) < 1e-6 for one in wrong), wrong
    assert logged["turns"] == [2.0, 3.0] * 3, logged["turns"]
    print(f"skyrl_gym:gsm8k_multi_turn: rewards {right} and {wrong}")


def tasks_of_reasoning_gym(folder: Path) -> None:
    import reasoning_gym

    for name in DATASETS:
        seeds = range(5)
        entries = [reasoning_gym.create_dataset(name, size=1, seed=seed)[0] for seed in seeds]

        def answered(text: str, generation: int, entries=entries) -> str:
            entry = next(one for one in entries if one["question"] in text)
            answer = entry["answer"]
            if answer is None:  # a task with several answers
                answer = entry["metadata"]["expression"]
            return f"<answer>{answer}</answer>" if generation == 0 else "I do not know."

        prompts = [{"prompt": "Answer in <answer></answer>.", "seed": seed} for seed in seeds]
        groups, *_ = rollouts(
            folder / name, answered, environment=f"reasoning_gym:{name}", tools=None, rewards=[], prompts=prompts,
            generations=2, max_tokens=2000, tool_workers=2,
        )  # fmt: skip
        right, wrong = zip(*([float(one.rewards[0]) for one in group.completions] for group in groups))
        assert all(value == 1.0 for value in right) and max(wrong) < 0.5, (name, right, wrong)
        print(f"reasoning_gym:{name}: rewards {right} and {wrong}")


def a_game_of_textarena(folder: Path) -> None:
    def bisected(text: str, generation: int) -> str:
        low, high = 1, 20
        for guess, hint in re.findall(r"\[(\d+)\].*?target number is (higher|lower)", text, re.DOTALL):
            low, high = (int(guess) + 1, high) if hint == "higher" else (low, int(guess) - 1)
        return f"[{(low + high) // 2}]"

    for name in ("GuessTheNumber-v0", "GuessTheNumber-v0-raw"):
        prompts = [{"prompt": "Play.", "seed": seed} for seed in range(4)]
        groups, logged, _ = rollouts(
            folder / name, bisected_after_the_rules(bisected), environment=f"textarena:{name}", tools=None,
            rewards=[], prompts=prompts, max_tokens=3000, tool_workers=2,
        )  # fmt: skip
        rewards = [float(group.completions[0].rewards[0]) for group in groups]
        assert all(value == 1.0 for value in rewards), rewards
        print(f"textarena:{name}: rewards {rewards}, turns {logged['turns']}")


def bisected_after_the_rules(script):
    """The rules have an example of a guess."""
    return lambda text, generation: script(text.partition("assistant\n")[2], generation)


def a_server_of_openenv(folder: Path) -> None:
    import uvicorn
    from openenv.core import Action, Environment, Observation, State, create_fastapi_app

    class Say(Action):
        message: str

    class Heard(Observation):
        text: str

    class Counting(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **more):
            self.count = 0
            return Heard(text="count from 0 to 2")

        def step(self, action, timeout_s=None, **more):
            is_right = action.message == str(self.count)
            self.count += 1
            return Heard(text=f"after {action.message}?", reward=0.5 * is_right, done=self.count == 3)

        @property
        def state(self):
            return State()

    app = create_fastapi_app(Counting, Say, Heard, max_concurrent_envs=8)
    server = uvicorn.Server(uvicorn.Config(app, port=18123, log_level="critical"))
    Thread(target=server.run, daemon=True).start()
    while not server.started:
        pass
    groups, logged, _ = rollouts(
        folder, lambda text, _: str(turn_number(text)), environment="openenv:http://127.0.0.1:18123", tools=None,
        rewards=[], prompts=[{"prompt": "Play.", "seed": seed} for seed in range(3)], tool_workers=2,
    )  # fmt: skip
    rewards = [float(group.completions[0].rewards[0]) for group in groups]
    assert rewards == [1.5] * 3, rewards
    print(f"openenv: rewards {rewards}, turns {logged['turns']}")
    server.should_exit = True


if __name__ == "__main__":
    main()
