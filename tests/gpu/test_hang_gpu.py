"""A rank that stops or is killed while others wait for it in NCCL: it is named, and the job ends or starts again."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from faults.ranks import Ranks, steps, until, words

import megalith

TIMEOUT = 15.0  # seconds


@pytest.mark.two_gpus
def test_a_stopped_rank_and_the_collective_that_waits_for_it_are_named(tmp_path):
    output = tmp_path / "run"
    command = words(
        output,
        train__train_iters=100_000,
        train__deterministic=False,
        runtime__device="cuda",
        runtime__compile=False,
        runtime__distributed_timeout_minutes=TIMEOUT / 60,
    )
    running = Ranks(command, 2, tmp_path / "log")
    until(lambda: len(steps(output)) >= 100, "step 100")
    running.send(signal.SIGSTOP, [1])
    stopped = time.monotonic()
    running.processes[0].join(90)
    took = time.monotonic() - stopped
    running.kill()
    said = running.text(0)
    assert running.processes[0].exitcode == 6 and TIMEOUT <= took < 3 * TIMEOUT, (took, said)
    assert re.search(r"rank 1 does not answer .*: it was in step \d+, training", said), said
    assert re.search(r"rank 0: step \d+, training, .*all_?reduce.* number \d+ of ", said, re.I), said


def rank_processes(output: Path, rank: int) -> list[int]:
    """Return the ids of the processes that are this rank of the run that writes to `output`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            environment = (folder / "environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in environment and str(output) in (folder / "cmdline").read_text():
                found.append(int(folder.name))
    return found


@pytest.mark.two_gpus
def test_a_rank_killed_in_a_step_is_named_and_the_restart_gives_the_same_bits(tmp_path):
    settings = dict(train__train_iters=120, checkpoint__save_interval=20, runtime__device="cuda")
    paths = {name: tmp_path / name for name in ("whole", "killed")}
    commands = {
        name: [
            sys.executable,
            "-m",
            "megalith",
            *words(path, **settings),
            "--nproc",
            "2",
            "--max-restarts",
            "1",
        ]
        for name, path in paths.items()
    }
    subprocess.run(commands["whole"], check=True, capture_output=True, timeout=240)
    log = tmp_path / "log"
    with log.open("w") as out:
        running = subprocess.Popen(commands["killed"], stdout=out, stderr=subprocess.STDOUT)
        try:
            until(lambda: len(steps(paths["killed"])) >= 30, "step 30")
            for process in rank_processes(paths["killed"], 1):
                os.kill(process, signal.SIGKILL)
            killed = time.monotonic()
            until(lambda: "SIGKILL" in log.read_text(), "the end of rank 1 in the log")
            assert time.monotonic() - killed < 60
            assert running.wait(240) == 0, log.read_text()
        finally:
            running.kill()
            running.wait()
    assert re.search(r"rank 1 .*SIGKILL", log.read_text()), log.read_text()
    whole, killed = (megalith.load(path).state_dict() for path in paths.values())
    assert all(torch.equal(whole[name], killed[name]) for name in whole)


def fails_on_its_gpu(rank: int, size: int, how: str, marks: str) -> None:
    """Make the last rank fail in step 20: its GPU reports an error, or it stops or dies in an all-reduce of its own."""
    from megalith.training.run_state import Run

    step = Run.train_step

    def train_step(run, *arguments):
        if rank == size - 1 and run.step == 19 and not Path(marks).exists():
            Path(marks).touch()
            if how == "GPU error":
                numbers = torch.arange(3, device="cuda")
                numbers[torch.tensor([7], device="cuda")]  # a device-side assertion
                torch.cuda.synchronize()
            torch.distributed.all_reduce(torch.ones(2**26, device="cuda"), async_op=True)
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        return step(run, *arguments)

    Run.train_step = train_step


@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.two_gpus), pytest.param(4, marks=pytest.mark.four_gpus)]
)
@pytest.mark.parametrize("how", ["GPU error", "killed", "stopped"])
def test_a_rank_that_fails_in_an_all_reduce_or_on_its_gpu_ends_the_others_and_loses_nothing(
    tmp_path, size, how
):
    def job(output: Path) -> list[str]:
        return words(
            output,
            train__train_iters=40,
            checkpoint__save_interval=10,
            train__global_batch_size=8,
            runtime__device="cuda",
            runtime__compile=False,
            runtime__distributed_timeout_minutes=TIMEOUT / 60,
        )

    prepare = partial(fails_on_its_gpu, size=size, how=how, marks=str(tmp_path / "mark"))
    running = Ranks(job(tmp_path / "run"), size, tmp_path / "log", prepare=prepare)
    began = time.monotonic()
    for process in running.processes[:-1]:
        process.join(240)
    if how == "stopped":
        running.processes[-1].kill()
    codes, text = running.end(60), running.text()
    assert all(codes[:-1]) and codes[-1], (codes, text)
    assert time.monotonic() - began < 240
    if how == "GPU error":
        assert "CUDA error" in running.text(size - 1)
    if how == "stopped":
        assert 6 in codes[:-1] and f"rank {size - 1} does not answer" in text
    again, whole = tmp_path / "again.log", tmp_path / "whole.log"
    assert Ranks(job(tmp_path / "run"), size, again).end() == [0] * size, again.with_name(
        "again.log.0"
    ).read_text()
    assert Ranks(job(tmp_path / "whole"), size, whole).end() == [0] * size
    ended, straight = (megalith.load(tmp_path / name).state_dict() for name in ("run", "whole"))
    assert all(torch.equal(straight[name], ended[name]) for name in straight)
