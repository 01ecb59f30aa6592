"""Stop signals, and the death of the launcher, in each phase of training and of GRPO lose nothing and leave no process.

Each job is stopped in one phase and started again. It must end with the state of a job that was never stopped.
"""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from forked import Forked
from in_process_job import MARKS, PLAN
from in_process_trials import JOB, left_by
from ranks import words

STEPS = 7
EXIT_CODES = {"SIGTERM": 22, "SIGUSR1": 23, "SIGINT": 24, "SIGHUP": 25}
BEFORE_TRAINING = "start", "connecting"
SAVED, ENDS_WITHIN = 20, 30.0
GRPO_MODEL = {
    "model.num_layers": 2,
    "model.hidden_size": 48,
    "model.ffn_hidden_size": 96,
    "model.num_attention_heads": 4,
    "model.vocab_size": 17,
    "model.make_vocab_size_divisible_by": 1,
    "model.max_position_embeddings": 25,
    "model.hidden_dropout": 0.0,
    "model.attention_dropout": 0.0,
    "model.normalization": "RMSNorm",
    "model.position_embedding_type": "rope",
    "model.add_bias_linear": False,
    "model.init_method_std": 0.2,
    "data.seq_length": 24,
    "data.tokenizer_type": "NullTokenizer",
    "rl.reward_funcs": "length",
    "rl.num_generations": 4,
    "rl.max_completion_length": 8,
    "optim.lr": 0.01,
    "train.micro_batch_size": 2,
    "train.global_batch_size": 8,
    "train.eval_iters": 0,
    "train.deterministic": True,
    "log.layout_report": False,
    "runtime.device": "cpu",
}


def training(output: Path, **settings: object) -> list[str]:
    own = {
        "train__eval_interval": 3,
        "train__eval_iters": 2,
        "data__split": "80,20",
        "model__hidden_dropout": 0.1,
    }
    return words(output, train__train_iters=STEPS, checkpoint__save_interval=2, **{**own, **settings})


def compiled(output: Path) -> list[str]:
    return training(output, runtime__compile=True, model__hidden_dropout=0.0)


def grpo(output: Path, steps: int = STEPS) -> list[str]:
    prompts = output.with_name("prompts.jsonl")
    if not prompts.exists():
        texts = [f"{n % 10} {n * 3 % 10} {n * 7 % 10}" for n in range(32)]
        lines = [json.dumps({"id": f"q{n}", "prompt": text}) for n, text in enumerate(texts)]
        prompts.write_text("\n".join(lines) + "\n")
    settings = {
        **GRPO_MODEL,
        "rl.prompts": str(prompts),
        "train.output_dir": str(output),
        "checkpoint.load": str(output),
        "train.train_iters": steps,
        "checkpoint.save_interval": 2,
    }
    return ["grpo", *(word for key, value in settings.items() for word in (f"--{key}", json.dumps(value)))]


def start(command: list[str], output: Path, failures: list, nproc: int = 2, **more: str) -> Forked:
    marks = output.with_suffix(".marks")
    marks.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        PLAN: json.dumps(failures),
        MARKS: str(marks),
        **more,
    }
    return Forked([JOB, *command, "--nproc", nproc], output.with_suffix(".log"), env=environment)


def finish(running: Forked, limit: float = 600.0) -> int:
    try:
        return running.wait(limit)
    finally:
        running.kill()


def state_of(output: Path) -> tuple:
    """Weights, optimizer state, losses and gradient norms. A stop signal skips an evaluation that is due."""
    return left_by(output, STEPS)[:2]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a function from a command to the state that it leaves if nothing stops it."""
    results = {}

    def left(command) -> tuple:
        if command not in results:
            output = tmp_path_factory.mktemp("undisturbed") / "run"
            assert finish(start(command(output), output, [])) == 0, output.with_suffix(".log").read_text()
            results[command] = state_of(output)
        return results[command]

    return left


def resume(command, output: Path, undisturbed) -> None:
    """Start the job again, to its end, and compare its state."""
    code = finish(start(command(output), output, []))
    text = output.with_suffix(".log").read_text()
    assert code == 0, text
    assert state_of(output) == undisturbed(command), text


def check_signal(
    output: Path, command, phase: str, number: int, name: str, undisturbed, to: str = ""
) -> None:
    running = start(command(output), output, [(1, phase, number, f"{to}{name}")])
    code = finish(running)
    text = output.with_suffix(".log").read_text()
    assert "Traceback" not in text, text
    if phase in BEFORE_TRAINING:
        assert code == 128 + signal.Signals[name], text
        assert not output.exists() or not (output / "checkpoints").exists()
    else:
        assert code == EXIT_CODES[name], text
        assert f"by {name}; resume with checkpoint.load" in text
    resume(command, output, undisturbed)


TRAINING_PHASES = [("start", 1), ("connecting", 1), ("build", 1), ("step", 4), ("save", 1), ("evaluation", 2)]
GRPO_PHASES = [("generation", 2), ("rewards", 2), ("weight sync", 2)]
CASES = [
    *((training, *phase) for phase in TRAINING_PHASES),
    (compiled, "compile", 1),
    *((grpo, *phase) for phase in GRPO_PHASES),
]
IDS = [phase for _, phase, _ in CASES]


@pytest.mark.full
@pytest.mark.parametrize("name", EXIT_CODES)
@pytest.mark.parametrize(("command", "phase", "number"), CASES, ids=IDS)
def test_a_stop_signal_in_each_phase_ends_with_its_code_and_loses_nothing(
    tmp_path, undisturbed, command, phase, number, name
):
    check_signal(tmp_path / "run", command, phase, number, name, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize(("command", "phase", "number"), CASES, ids=IDS)
def test_a_stop_signal_to_the_launcher_in_each_phase_ends_with_its_code_and_loses_nothing(
    tmp_path, undisturbed, command, phase, number
):
    check_signal(tmp_path / "run", command, phase, number, "SIGTERM", undisturbed, to="launcher ")


@pytest.mark.full
@pytest.mark.fault(3)
@pytest.mark.parametrize(("command", "phase", "number"), CASES, ids=IDS)
def test_a_launcher_killed_in_each_phase_leaves_no_process_and_loses_nothing(
    tmp_path, undisturbed, command, phase, number
):
    output = tmp_path / "run"
    running = start(command(output), output, [(0, phase, number, "launcher SIGKILL")])
    log, seen = output.with_suffix(".log"), set()
    deadline = time.monotonic() + 120
    while running.returncode is None and time.monotonic() < deadline:
        seen |= writers_of(log)
        time.sleep(0.01)
    assert running.wait(0) == -signal.SIGKILL, log.read_text()
    deadline = time.monotonic() + ENDS_WITHIN
    while left := writers_of(log):
        seen |= left
        assert time.monotonic() < deadline, f"of {seen}, {left} run on"
        time.sleep(0.05)
    if phase not in BEFORE_TRAINING:  # where a rank may kill the launcher before it has started the other
        assert len(seen) >= 3
    resume(command, output, undisturbed)


def writers_of(log: Path) -> set[int]:
    """Return the processes that have a log open: a launcher, its ranks and what they have started."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # the process has ended
            if os.readlink(link) == str(log):
                found.add(int(link.parts[2]))
    return found
