"""Long runs keep their memory, descriptors and threads: 8 ranks for 500 steps, and GRPO for 300."""

import time
from pathlib import Path

import pytest
from in_process_trials import job, start
from ranks import steps, workers_of
from test_phases import grpo
from test_phases import start as start_grpo

pytestmark = pytest.mark.full
ALLOWED_GROWTH = 1.03  # of the resident memory, between the first measurement and the last


def resources(pid: int) -> tuple[int, int, int]:
    """Return a process's resident kilobytes, threads and open descriptors."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return int(status["VmRSS"].split()[0]), int(status["Threads"]), descriptors


def measure(running, output: Path, size: int, at: list[int]) -> list[list[tuple[int, int, int]]]:
    """Return each rank's resources after these steps, by rank. Waits for the job's end."""
    measured, deadline = [], time.monotonic() + 3600
    try:
        for step in at:
            while len(steps(output)) < step and running.returncode is None:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            ranks = workers_of(running)
            assert len(ranks) == size, output.with_suffix(".log").read_text()
            measured.append([resources(pid) for pid in ranks])
        assert running.wait(600) == 0, output.with_suffix(".log").read_text()
    finally:
        running.kill()
    return [list(rank) for rank in zip(*measured)]


def assert_flat(ranks: list[list[tuple[int, int, int]]]) -> None:
    for rank, (first, *rest) in enumerate(ranks):
        for memory, threads, descriptors in rest:
            # A save in the background, or a snapshot's thread, may be under way at either moment.
            assert abs(threads - first[1]) <= 4 and abs(descriptors - first[2]) <= 4, (rank, ranks[rank])
            assert memory <= ALLOWED_GROWTH * first[0], (rank, ranks[rank])


def test_eight_ranks_for_500_steps_keep_their_memory_descriptors_and_threads(tmp_path):
    output = tmp_path / "run"
    settings = {
        "train__global_batch_size": 8,
        "train__eval_interval": 50,
        "checkpoint__save_interval": 20,
        "checkpoint__keep_last": 2,
        "checkpoint__async_save": True,
        "checkpoint__memory_interval": 5,
        "runtime__distributed_timeout_minutes": 10,
    }
    command = job(output, "tensor × data", 500, **settings)
    command[command.index("--nproc") + 1] = "8"
    assert_flat(measure(start(command, output, [], None), output, 8, [150, 250, 350, 450, 490]))


def test_300_steps_of_grpo_keep_their_memory_descriptors_and_threads(tmp_path):
    output = tmp_path / "run"
    command = [*grpo(output, 300), "--checkpoint.keep_last", "2", "--checkpoint.save_interval", "20"]
    assert_flat(measure(start_grpo(command, output, []), output, 2, [100, 160, 220, 280]))
