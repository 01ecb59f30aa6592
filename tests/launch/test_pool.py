"""The pool: each job in processes of its own, which leave nothing, and whose end is told."""

import ctypes
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import is_running
from sockets import LOOPBACK_INTERFACE, listening

from megalith.launch.network import is_loopback
from megalith.launch.pool import Pool, RankFailed

PR_GET_PDEATHSIG = 2  # Linux: prctl option
seen = []


def leave_traces() -> tuple[list[str], int, float]:
    """What earlier jobs left of those, the number of threads, and a sum over all ranks."""
    before = list(seen), len(os.listdir("/proc/self/task"))
    seen.append("a job")
    total = torch.ones(())
    dist.all_reduce(total, group=dist.new_group())
    return *before, total.item()


def test_a_job_finds_nothing_of_the_one_before(pool):
    first = pool.run(leave_traces)
    assert pool.run(leave_traces) == first
    assert [(traces, total) for traces, _, total in first] == [([], pool.size)] * pool.size


def what_listens(pool: int) -> tuple[list[str], str]:
    """The addresses at which this rank, its worker and the pool's own process listen, and gloo's interface."""
    dist.new_group()
    return [a for pid in (os.getpid(), os.getppid(), pool) for a in listening(pid)], os.environ[
        "GLOO_SOCKET_IFNAME"
    ]


def test_a_job_of_the_pool_is_reached_from_this_machine_alone(pool):
    for addresses, interface in pool.run(what_listens, os.getpid()):
        assert len(addresses) >= 2 and all(map(is_loopback, addresses)), addresses
        assert interface == LOOPBACK_INTERFACE


def signal_of_the_parents_end() -> int:
    number = ctypes.c_int()
    assert ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0) == 0
    return number.value


def test_a_job_does_not_outlive_its_worker(pool):
    assert pool.run(signal_of_the_parents_end) == [signal.SIGKILL] * pool.size


def sleep_long(file: Path) -> None:
    file.write_text(f"{os.getpid()}\n")
    time.sleep(1000)


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_job_ends_with_the_process_of_its_pool(tmp_path):
    file, pool = tmp_path / "pid", Pool(1)
    pool._start()
    ((worker, pipe),) = pool._workers
    job = 1, 0, 1, "cpu", pool._store.port, 1000.0, pickle.dumps((sleep_long, (file,)))
    try:
        pipe.send((sys.path, [__name__], job))
        wait_until(lambda: file.exists() and file.read_text().endswith("\n"))
        pipe.close()  # as the kernel does for a killed process
        wait_until(lambda: not is_running(int(file.read_text())) and not worker.is_alive())
    finally:
        pool.close()


def killed_by_itself() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def crashes_beside_one_that_waits() -> None:
    if dist.get_rank() == 1:
        os.abort()
    dist.barrier()


def test_the_stacks_of_a_rank_that_crashed_are_told_and_not_the_loss_of_its_connection(pool):
    with pytest.raises(RankFailed, match=r"rank 1:\n.*SIGABRT\nFatal Python error(.|\n)*crashes_beside_one"):
        pool.run(crashes_beside_one_that_waits, size=2)


def fails_beside_one_that_waits(folder: str) -> None:
    rank = dist.get_rank()
    with open(f"{folder}/{rank}", "w") as file:
        file.write(str(os.getpid()))
    dist.barrier()
    if rank == 0:
        raise ValueError("rank 0 gives up")
    time.sleep(1000)


def test_the_signal_that_ended_a_rank_is_told_and_the_pool_goes_on(pool):
    with pytest.raises(RankFailed, match=r"rank 1:\n.*SIGKILL"):
        pool.run(killed_by_itself, size=2)
    assert pool.run(leave_traces, size=2)[0][2] == 2


def test_a_rank_that_fails_ends_those_that_wait(pool, tmp_path):
    with pytest.raises(RankFailed, match="rank 0 gives up") as failure:
        pool.run(fails_beside_one_that_waits, str(tmp_path), size=2)
    assert isinstance(failure.value.__cause__, ValueError)
    waiting = int((tmp_path / "1").read_text())
    while is_running(waiting):  # for 1000 s if it outlived its job
        time.sleep(0.01)
