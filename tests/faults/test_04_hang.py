"""4: a stopped rank, and one that leaves out a collective: noticed in time, both named, and the job ended."""

import contextlib
import json
import os
import re
import signal
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, launch, saved, steps, until, words, workers_of

import megalith.training.training_job
from megalith.errors import TrainingError
from megalith.launch import hang_watch
from megalith.launch.hang_watch import RankStatus, hang_message
from megalith.launch.heartbeat import collective_timeout
from megalith.training.run_state import Run

TIMEOUT = 4.0  # seconds


def watched(output, **settings) -> list[str]:
    return words(
        output, train__train_iters=100_000, runtime__distributed_timeout_minutes=TIMEOUT / 60, **settings
    )


@pytest.mark.full
@pytest.mark.fault(4)
def test_a_stopped_rank_is_named_and_the_others_end(tmp_path):
    output = tmp_path / "run"
    running = Ranks(watched(output), 2, tmp_path / "log")
    until(lambda: len(steps(output)) >= 40, "step 40")  # the watch has looked several times
    running.send(signal.SIGSTOP, [1])
    stopped = time.monotonic()
    running.processes[0].join(collective_timeout(timedelta(seconds=TIMEOUT)).total_seconds())
    took = time.monotonic() - stopped
    running.kill()
    assert running.processes[0].exitcode == 6  # by the watch, before a collective's own time-out
    assert took >= TIMEOUT
    said = running.text(0)
    assert re.search(r"rank 1 does not answer .*: it was in step \d+, training", said), said
    assert re.search(r"rank 0: step \d+, training, .* number \d+ of .*, called from \w+ \(megalith/", said), (
        said
    )
    (dump,) = output.glob("flight_recorder_rank0.json")
    assert any("all_reduce" in entry["profiling_name"] for entry in json.loads(dump.read_text()))


@pytest.mark.full
@pytest.mark.fault(4)
def test_a_launcher_starts_a_job_again_whose_rank_stands_still(tmp_path):
    output, log = tmp_path / "run", tmp_path / "log"
    command = watched(output, checkpoint__save_interval=20, checkpoint__keep_last=1)
    launcher = launch(command, "--nproc", "2", "--max-restarts", "1", log=log)
    try:
        until(lambda: saved(output), "a checkpoint")
        os.kill(workers_of(launcher)[1], signal.SIGSTOP)
        until(lambda: "resuming from" in log.read_text(), "the restart")
        before = len(steps(output))
        until(lambda: len(steps(output)) > before, "another step")
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait() == 22, log.read_text()
    finally:
        launcher.kill()
        launcher.wait()
    told = log.read_text()
    assert "restarting (1 of 1)" in told and "rank 1 does not answer" in told


def lose_the_store(rank: int) -> None:
    """Rank 0, with the store, is lost while rank 1 is about to connect to it for its watch."""
    inner = megalith.training.training_job.open_hang_watch
    hang_watch.STORE_TIMEOUT = 2.0

    def open_hang_watch(heartbeat, process, *rest):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        with contextlib.suppress(ConnectionError):
            while True:  # to the end of who listens there
                socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"]))).close()
                time.sleep(0.02)
        return inner(heartbeat, process, *rest)

    megalith.training.training_job.open_hang_watch = open_hang_watch


def test_a_rank_whose_store_is_lost_while_it_starts_ends(tmp_path):
    running = Ranks(
        words(tmp_path / "run", train__train_iters=3), 2, tmp_path / "log", prepare=lose_the_store
    )
    codes = running.end()
    assert codes == [-signal.SIGKILL, TrainingError.exit_code], running.text()
    assert "the ranks' store does not answer" in running.text(), running.text()


def wait_elsewhere(rank: int) -> None:
    """In step 4 rank 1 waits for a message that nobody sends, where rank 0 goes on to a collective."""
    inner = Run.train_step

    def train_step(self, *given):
        if rank == 1 and self.step == 3:
            dist.recv(torch.zeros(1), src=0)
        return inner(self, *given)

    Run.train_step = train_step


@pytest.mark.fault(4)
def test_ranks_that_wait_in_different_collectives_are_told_with_both(tmp_path):
    output = tmp_path / "run"
    running = Ranks(watched(output), 2, tmp_path / "log", prepare=wait_elsewhere)
    until(lambda: len(steps(output)) >= 3, "step 3")
    codes = running.end()
    assert 6 in codes, running.text()
    said = next(text for text in (running.text(0), running.text(1)) if "no progress" in text)
    assert "does not answer" not in said
    assert re.search(r"rank 0: step 4, training, all_reduce number \d+ of ", said), said
    assert re.search(r"rank 1: step 4, training, recv, called from _train_steps ", said), said


def test_the_rank_that_differs_from_most_comes_first():
    place = "megalith/parallel/data/gradient_norm.py:28"
    waiting = f"all_reduce number 31 of default_pg, called from valid_tokens ({place})"
    signs = {rank: RankStatus(9, 7, "training", waiting) for rank in range(4)}
    signs[2] = RankStatus(9, 7, "training", waiting.replace("31", "30"))
    text = hang_message(signs, {3}, 5, 600.0)
    assert (
        text.index("rank 3 does not answer") < text.index("rank 2: step 7") < text.index("ranks 0, 1: step 7")
    )
    assert "number 30 of default_pg" in text and "within 600 s" in text and "rank 4" not in text
