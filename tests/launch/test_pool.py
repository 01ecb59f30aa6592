"""The pool: each job in processes of its own, which leave nothing, and whose end is told."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from forked import is_running
from sockets import LOOPBACK_INTERFACE, listening

from megalith.launch.network import is_loopback
from megalith.launch.pool import RankFailed

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
