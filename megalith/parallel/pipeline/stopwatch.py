"""Start and end times of a rank's pipeline actions, measured on a GPU by CUDA events, which do not block the host."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from megalith.comm.collectives import Axis


class Stopwatch:
    """Start and stop times of one rank, in milliseconds since a barrier of all ranks of `axis`."""

    def __init__(self, device: torch.device, axis: Axis):
        self._cuda = device.type == "cuda"
        if self._cuda:
            torch.cuda.synchronize(device)
        dist.barrier(group=axis.group)
        self._zero = self._now()
        self._marks: list = []

    def start(self) -> None:
        self._marks.append(self._now())

    def stop(self) -> None:
        self._marks.append(self._now())

    def read(self) -> list[tuple[float, float]]:
        """Return the times (start, end) of each pair of marks. Waits until the device has reached the last mark."""
        if self._cuda:
            self._marks[-1].synchronize()
            times = [self._zero.elapsed_time(mark) for mark in self._marks]
        else:
            times = [1000.0 * (mark - self._zero) for mark in self._marks]
        return list(zip(times[::2], times[1::2]))

    def _now(self) -> torch.cuda.Event | float:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
