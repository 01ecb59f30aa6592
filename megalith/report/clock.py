"""Clocks: the duration of each step and of its phases, and the time from process start to the first step."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch

from megalith.launch.parent import process_start_time


def process_age() -> float | None:
    """Seconds since the system started this process; None where it does not tell."""
    started = process_start_time(os.getpid())
    if started is None:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


class StartupTimer:
    """Where the seconds go from the start of the process to the end of its first step."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, float]] = []  # what, and the process's age at its end

    def mark(self, part: str) -> None:
        """What has been done since the mark before."""
        if (age := process_age()) is not None:
            self._parts.append((part, age))

    def __str__(self) -> str:
        """A sentence; empty where the system does not tell the process's age."""
        if not self._parts:
            return ""
        ends = [0.0, *(age for _, age in self._parts)]
        parts = (f"{part} {end - start:.1f}" for (part, end), start in zip(self._parts, ends))
        return f"first step {ends[-1]:.1f} s after the process was started: {', '.join(parts)}"


class StepTimer:
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


class PhaseTimers:
    """Times the phases of each step, by Megatron-LM's names and levels: those above `level` are not timed."""

    LEVELS: ClassVar = {"forward-backward": 1, "optimizer": 1, "batch-generator": 2}

    def __init__(self, device: torch.device, level: int):
        self._clocks = {name: StepTimer(device) for name, own in self.LEVELS.items() if own <= level}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Around a phase of LEVELS; never waits for the device."""
        clock = self._clocks.get(name)
        if clock is not None:
            clock.start()
        yield
        if clock is not None:
            clock.stop()

    def means(self) -> dict[str, float]:
        """Milliseconds a step of each phase since the last call; waits for the device."""
        spans = {name: clock.milliseconds() for name, clock in self._clocks.items()}
        return {name: sum(times) / len(times) for name, times in spans.items() if times}


def format_timers(ranks: Sequence[Mapping[str, float]], option: str) -> str:
    """Megatron-LM's lines of each rank's times in ms: the least and greatest, the greatest alone, or all."""
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
