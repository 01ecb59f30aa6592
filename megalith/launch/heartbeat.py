"""Progress of this rank, which the hang watch (hang_watch.py) checks, and collective timeouts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch

from megalith.comm.collectives import all_reduce_no_grad
from megalith.compat.process_groups import process_groups, set_timeout
from megalith.parallel.mesh import Mesh

PATIENCE = timedelta(days=1)  # timeout of collectives during long work, such as a save
BACKGROUND = (
    "background"  # description of a process group whose timeout does not change: no step waits for it
)


class Heartbeat:
    """Step and phase of this rank, updated by `beat` whenever the training loop makes progress.

    No beat is expected during `long_work` and before the first `end_long`.

    Collectives time out later than the hang watch, whose message is more informative. During long work, collectives
    wait for up to a day, because one rank's disk may be slow. The ranks synchronize at the end of long work, so that no
    step waits for a slow rank's work.
    """

    def __init__(self, mesh: Mesh, timeout: timedelta):
        self._mesh, self._timeout = mesh, collective_timeout(timeout)
        self.step, self.phase = 0, ""
        self.last_beat = time.monotonic()
        self.begin_long("starting")

    def beat(self, step: int, phase: str) -> None:
        """Record progress in `step`, counted from 1."""
        self.step, self.phase = step, phase
        self.last_beat = time.monotonic()

    @contextmanager
    def long_work(self, phase: str) -> Iterator[None]:
        """Context for long work of all ranks together, such as a save."""
        before = self.phase
        self.begin_long(phase)
        yield
        self.end_long(before)

    def begin_long(self, phase: str) -> None:
        self.phase, self.is_long = phase, True
        set_collective_timeouts(PATIENCE)

    def end_long(self, phase: str) -> None:
        """Wait until the other ranks have finished their long work, then restore the timeout."""
        all_reduce_no_grad(torch.zeros(()), self._mesh.world)
        set_collective_timeouts(self._timeout)
        self.beat(self.step, phase)
        self.is_long = False


def collective_timeout(timeout: timedelta) -> timedelta:
    """Return the timeout of collectives for a hang watch with this timeout."""
    return 2 * timeout + timedelta(minutes=1)


def set_collective_timeouts(timeout: timedelta) -> None:
    """Set the timeout of all process groups except those that are described as BACKGROUND.

    This includes groups created with torch's default: pipeline links, hybrid sharding, two-level context parallelism.
    """
    for group in process_groups():
        if group.group_desc != BACKGROUND:
            set_timeout(group, timeout)
