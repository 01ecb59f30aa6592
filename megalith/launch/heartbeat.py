"""What this rank is doing now, for the hang watch (hang_watch.py), and how long a collective may wait meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _set_pg_timeout

from megalith.comm.collectives import all_reduce_no_grad
from megalith.parallel.mesh import Mesh

PATIENCE = timedelta(days=1)  # of a collective while a rank may be busy with its disk
BACKGROUND = "background"  # describes a group that keeps the patience it was made with: no step waits for it


class Heartbeat:
    """`beat` whenever the loop has come further. In `long_work`, and before the first `end_long`, nothing has to.

    Collectives wait for longer than `timeout`, after which the watch ends a step that hangs: its words say more
    than theirs. In long work they wait for a day: there one rank may take longer, for its disk, than another may
    wait. The ranks synchronize at its end, so that none waits for it in a step.
    """

    def __init__(self, mesh: Mesh, timeout: timedelta):
        self._mesh, self._timeout = mesh, collective_timeout(timeout)
        self.step, self.phase = 0, ""
        self.last_beat = time.monotonic()
        self.begin_long("starting")

    def beat(self, step: int, phase: str) -> None:
        """`step` is the one being made, counted from 1."""
        self.step, self.phase = step, phase
        self.last_beat = time.monotonic()

    @contextmanager
    def long_work(self, phase: str) -> Iterator[None]:
        """Work such as a save, which all ranks do together."""
        before = self.phase
        self.begin_long(phase)
        yield
        self.end_long(before)

    def begin_long(self, phase: str) -> None:
        self.phase, self.is_long = phase, True
        set_collective_timeouts(PATIENCE)

    def end_long(self, phase: str) -> None:
        """Waits for the other ranks' long work; from here on the time-out holds again."""
        all_reduce_no_grad(torch.zeros(()), self._mesh.world)
        set_collective_timeouts(self._timeout)
        self.beat(self.step, phase)
        self.is_long = False


def collective_timeout(timeout: timedelta) -> timedelta:
    """What collectives wait where the hang watch waits for `timeout`."""
    return 2 * timeout + timedelta(minutes=1)


def set_collective_timeouts(timeout: timedelta) -> None:
    """How long the collectives of every process group wait from now on: those of pipeline links, of hybrid sharding and
    of two-level context parallelism too, to which torch gave its own default. Not those of BACKGROUND."""
    for group in list(distributed_c10d._world.pg_map):
        if group.group_desc != BACKGROUND:
            _set_pg_timeout(timeout, group)
