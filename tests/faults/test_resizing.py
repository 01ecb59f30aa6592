"""Machines that are lost or join while the ranks of the others stay in their processes (`--nnodes MIN:MAX`)."""

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from forked import Forked, free_port
from in_process_trials import restarts
from ranks import events, launch, records, saved, steps, stored, until, words, workers_of

pytestmark = pytest.mark.full
SHARDED = {"parallel__data_parallel_sharding_strategy": "optim_grads_params"}


class Machines:
    """Launchers of two ranks each on one machine, which find each other at one port."""

    def __init__(self, folder: Path, command: list[str], nnodes: str):
        self.folder, self.launchers, self.logs = folder, [], []
        self._options = ("--nproc", "2", "--nnodes", nnodes, "--max-restarts", "3")
        self._options += ("--rdzv-endpoint", f"127.0.0.1:{free_port()}")
        self._command = command

    def start(self) -> Forked:
        log = self.folder / f"log{len(self.launchers)}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.launchers.append(
            Forked(["-m", "megalith", *self._command, *self._options], log, env=environment)
        )
        self.logs.append(log)
        return self.launchers[-1]

    def text(self) -> str:
        return "".join(log.read_text() for log in self.logs)

    def until(self, text: str) -> None:
        def is_printed() -> bool:
            assert all(each.returncode in (None, -signal.SIGKILL) for each in self.launchers), self.text()
            return text in self.text()

        until(is_printed, text)

    def __enter__(self) -> "Machines":
        return self

    def __exit__(self, *_) -> None:
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()


def settings(output: Path, **others: object) -> list[str]:
    own = {
        "train__train_iters": 100_000,
        "model__hidden_dropout": 0.1,
        "checkpoint__save_interval": 2,
        "checkpoint__memory_interval": 2,
        "log__log_interval": 1,
        "runtime__distributed_timeout_minutes": 0.3,
        **others,
    }
    return words(output, **own)


def losses(output: Path, first: int, last: int) -> dict[int, float]:
    return {
        each["step"]: each["loss"]
        for each in records(output / "metrics.jsonl")
        if first < each["step"] <= last
    }


def continued(output: Path, folder: Path, step: int, end: int, ranks: int, **others: object) -> Path:
    """Run steps `step` to `end` from the checkpoint of `output` with a job of `ranks` ranks; return its folder."""
    folder.mkdir()
    shutil.copytree(output / "checkpoints" / f"step_{step:08d}", folder / "start" / f"step_{step:08d}")
    command = settings(folder / "run", train__exit_interval=end, **others)
    command[command.index("--checkpoint.load") + 1] = str(folder / "start")
    launcher = launch(command, "--nproc", str(ranks), log=folder / "log")
    assert launcher.wait() == 20, (folder / "log").read_text()
    return folder / "run"


@pytest.mark.fault(17)
@pytest.mark.parametrize(
    "layout", [SHARDED, {"parallel__tensor_model_parallel_size": 2}], ids=["sharded", "tensor"]
)
def test_a_job_goes_on_with_a_machine_that_joins_and_without_it_in_the_same_processes(tmp_path, layout):
    output = tmp_path / "run"

    def continues(count: int) -> None:
        until(lambda: job.text().count("continuing from memory") == count, f"restart {count}")

    with Machines(tmp_path, settings(output, **layout), "1:2") as job:
        first = job.start()
        job.until("layout: 2 ranks")
        until(lambda: len(steps(output)) > 4, "steps of one machine")
        ranks = workers_of(first)
        second = job.start()
        job.until("continuing with 4 ranks on 2 machines")
        continues(1)
        before = steps(output)[-1]
        until(lambda: steps(output)[-1] > before + 6, "steps of two machines")
        second.kill()
        job.until("continuing with 2 ranks on 1 machine")
        continues(2)
        joined, lost = map(int, re.findall(r"continuing from memory: step (\d+)", job.text()))
        until(lambda: steps(output)[-1] > lost + 4, "steps of one machine")
        assert workers_of(first) == ranks
        first.send_signal(signal.SIGTERM)
        assert first.wait() == 22, job.text()
    assert restarts(job.text()) == (0, 0)
    assert [event["step"] for event in events(output, "grow")] == [joined] and lost > joined
    end = steps(output)[-1]
    assert steps(output) == list(range(1, end + 1)) and saved(output)[-1] == f"step_{end:08d}"
    assert {record["global_batch_size"] for record in records(output / "metrics.jsonl")} == {4}
    for name, ranks, start, last in (("larger", 4, joined, lost), ("smaller", 2, lost, end)):
        alone = continued(output, tmp_path / name, start, last, ranks, **layout)
        assert losses(alone, start, last) == losses(output, start, last)
        assert stored(alone, last) == stored(output, last)
