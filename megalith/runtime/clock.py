"""How long each step took, without waiting for the device until the figures are read."""

from __future__ import annotations

import time

import torch


class StepClock:
    """Times spans on a device's own stream. `start` and `stop` never wait; `milliseconds` does, once for all."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._spans: list[tuple] = []

    def start(self) -> None:
        self._began = self._now()

    def stop(self) -> None:
        self._spans.append((self._began, self._now()))

    def milliseconds(self) -> list[float]:
        """The duration of every span since the last call."""
        spans, self._spans = self._spans, []
        if not self._cuda:
            return [(end - begin) * 1e3 for begin, end in spans]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in spans]

    def _now(self):
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
