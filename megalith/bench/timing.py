"""Timing of device work, shared by the benchmarks."""

from __future__ import annotations

from collections.abc import Callable

import torch


def synchronize(device: torch.device | str) -> None:
    """Wait for a CUDA device's work. Does nothing on the CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def elapsed_ms(function: Callable[[], object], calls: int = 1) -> float:
    """Return the GPU's milliseconds per call of consecutive calls. The host waits for the GPU after the last one."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls
