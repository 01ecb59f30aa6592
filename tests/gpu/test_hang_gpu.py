"""A rank that is stopped while others wait for it in NCCL: named, with the collective, and the job ended."""

import re
import signal
import time

import pytest
import torch
from faults.ranks import Ranks, steps, until, words

TIMEOUT = 15.0  # seconds


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
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
