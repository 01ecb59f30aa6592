"""A rank that stops or is killed while others wait for it in NCCL: it is named, and the job ends or starts again."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
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
