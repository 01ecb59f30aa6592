"""Measures the seconds of each phase of a GRPO step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PhaseTimer:
    """Accumulates seconds per phase until `take` is called."""

    def __init__(self, device: torch.device):
        self._device = device
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the duration of the block to `phase`, including work queued on the device."""
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Return and clear the seconds by phase."""
        seconds, self._seconds = self._seconds, {}
        return seconds
