"""Timers for steps and their phases, and for the startup: from process start to the end of the first step."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch

from megalith.launch.parent import process_start_time


def process_age() -> float | None:
    """Return the seconds since this process was started, or None if the system does not report it."""
    started = process_start_time(os.getpid())
    if started is None:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


class StartupTimer:
    """Times the phases of startup, from process start to the end of the first step."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, float]] = []  # phase, and the process's age at its end, in seconds

    def mark(self, part: str) -> None:
        """End the phase `part`, which began at the previous call."""
        if (age := process_age()) is not None:
            self._parts.append((part, age))

    def __str__(self) -> str:
        """Return a sentence with all phases; empty if the process's age is unknown."""
        if not self._parts:
            return ""
        ends = [0.0, *(age for _, age in self._parts)]
        parts = (f"{part} {end - start:.1f}" for (part, end), start in zip(self._parts, ends))
        return f"first step {ends[-1]:.1f} s after the process was started: {', '.join(parts)}"


class StepTimer:
    """Times spans on a device's current stream. Only `milliseconds` synchronizes."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._spans: list[tuple] = []

    def start(self) -> None:
        self._began = self._now()

    def stop(self) -> None:
        self._spans.append((self._began, self._now()))

    def milliseconds(self) -> list[float]:
        """Return the duration of every span since the last call, in ms."""
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


class PhaseTimers:
    """Times the phases of each step, under Megatron-LM's names. Phases whose Megatron timing level is above `level` are
    skipped.
    """

    LEVELS: ClassVar = {"forward-backward": 1, "optimizer": 1, "batch-generator": 2}

    def __init__(self, device: torch.device, level: int):
        self._clocks = {name: StepTimer(device) for name, minimum in self.LEVELS.items() if minimum <= level}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the phase `name` without synchronizing the device."""
        clock = self._clocks.get(name)
        if clock is not None:
            clock.start()
        yield
        if clock is not None:
            clock.stop()

    def means(self) -> dict[str, float]:
        """Return each phase's mean milliseconds per step since the last call. Synchronizes the device."""
        spans = {name: clock.milliseconds() for name, clock in self._clocks.items()}
        return {name: sum(times) / len(times) for name, times in spans.items() if times}


def format_timers(ranks: Sequence[Mapping[str, float]], option: str) -> str:
    """Return Megatron-LM's timer lines.

    Args:
        ranks: by rank, milliseconds by phase.
        option: `minmax`, `max` or `all`, as `--timing-log-option`.
    """
    heads = {"minmax": "(min, max) time", "max": "max time", "all": "times"}
    lines = [f"{heads[option]} across ranks (ms):"]
    for name in ranks[0]:
        times = [rank[name] for rank in ranks]
        if option == "all":
            lines += [f"  {name}:", *(f"     rank {rank:2d}: {time:.2f}" for rank, time in enumerate(times))]
        else:
            shown = f"({min(times):.2f}, {max(times):.2f})" if option == "minmax" else f"{max(times):.2f}"
            lines.append(f"    {f'{name} '.ljust(48, '.')}: {shown}")
    return "\n".join(lines)
