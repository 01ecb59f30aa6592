"""Where the time of one step went on this rank: compute, exposed communication, pipeline bubble, or idle.

One step runs under torch's profiler, and its spans are overlaid. On a GPU these are the spans of kernels on the device:

    compute         any kernel runs that is not NCCL's, nor on a stream that copies from other GPUs (copy_engine.py)
    communication   only those run, except a pipeline's sends and receives: it is exposed; with the idle time before
                    such a copy, as no kernel waits for a flag
    bubble          only a pipeline's sends and receives run: the rank waits for another stage
    idle            nothing runs: the device waits for the host

On a CPU the device is the host. Communication is the time of gloo's collectives less the operations that the rank
computed meanwhile, the bubble is the time that the pipeline waited for a receive, and the rest is compute.

The ranks synchronize before the step, and the device after it, so what a rank waits in a collective is due to the step
itself.

Stragglers are ranks that compute for longer than others with the same work, for whom all of them wait in every step. A
step takes as long on every rank, for they meet in its collectives. So every so many steps one is measured, and what a
rank neither spent in communication nor waited for the pipeline is its own time. It is compared with that of the ranks
at the same pipeline stage.

Also here: how long each step took, without waiting for the device until the figures are read, and the process's age.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median_low
from typing import ClassVar

import torch
import torch.distributed as dist

from megalith.comm.collectives import Axis, gather_json
from megalith.config import RuntimeConfig
from megalith.launch.parent import started_at
from megalith.parallel.mesh import Mesh
from megalith.parallel.pipeline.executor import PASS, WAITS

MARK = "megalith: the measured step"
DIRECT = "PtoP"  # in the names of copies from another GPU
PIPELINE_TITLES = ("nccl:send", "nccl:recv", "gloo:send", "gloo:recv")

Span = tuple[int, int]  # start and end, nanoseconds


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of one step on one rank; the four parts make up the whole."""

    step: float
    compute: float
    communication: float
    bubble: float
    idle: float
    pipeline_end: float | None = None
    """When this rank was through with the pipeline's actions, counted from the step's start."""


def with_last_wait(times: Sequence[StepTimes]) -> list[StepTimes]:
    """The times of a pipeline's ranks, in which the wait for the last one to finish counts as bubble.

    A rank that has done its actions waits for the others in the first collective that they share, the loss's.
    """
    ends = [each.pipeline_end for each in times]
    if None in ends:
        return list(times)
    waits = [min(max(ends) - each.pipeline_end, each.communication) for each in times]
    return [
        replace(each, communication=each.communication - wait, bubble=each.bubble + wait)
        for each, wait in zip(times, waits)
    ]


class StepMeasure:
    """Measures one step: `start` before it and `stop` after it, on every rank of `world`."""

    def __init__(self, device: torch.device, world: Axis):
        self._device, self._world = device, world

    def start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its notices would stand between the log's lines
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()
        self._synchronize()
        if self._world.size > 1:
            dist.barrier(group=self._world.group)
            self._synchronize()
        self._mark = torch.profiler.record_function(MARK)
        self._mark.__enter__()

    def stop(self) -> StepTimes:
        self._synchronize()
        self._mark.__exit__(None, None, None)
        self._profile.stop()
        # Torch's own events() takes minutes for a large step: these are what it is made of.
        events = self._profile.profiler.kineto_results.events()
        return device_times(events) if self._device.type == "cuda" else host_times(events)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Stragglers:
    """`before_step` and `after_step` of every step, on every rank; `tell` is called with what was found, a sentence
    and its figures."""

    def __init__(
        self,
        config: RuntimeConfig,
        mesh: Mesh,
        device: torch.device,
        is_traced: Callable[[int], bool],
        tell: Callable[..., None],
    ):
        """`is_traced` says of a step whether a profiler runs in it already."""
        self._interval = config.straggler_interval
        self._enabled = config.enable_straggler_detection and mesh.world.size > 1
        self._threshold = config.straggler_threshold
        self._mesh, self._device, self._is_traced, self._tell = mesh, device, is_traced, tell
        self._measure: StepMeasure | None = None
        self._step = 0

    def before_step(self, step: int) -> None:
        if self._enabled and step % self._interval == 0 and not self._is_traced(step):
            self._step, self._measure = step, StepMeasure(self._device, self._mesh.world)
            self._measure.start()

    def after_step(self) -> None:
        if self._measure is None:
            return
        times = self._measure.stop()
        self._measure = None
        own = dict(enumerate(gather_json(own_time(times), self._mesh.world)))
        stages: dict[int, dict[int, float]] = {}
        for rank, milliseconds in own.items():
            stages.setdefault(self._mesh.describe(rank).pp, {})[rank] = milliseconds
        for stage in stages.values():
            for rank, ratio in slow_ranks(stage, self._threshold).items():
                self._tell(
                    f"rank {rank} is slow: in step {self._step} it computed for {own[rank]:.1f} ms, {ratio:.2f} times "
                    f"the median of ranks with the same work; look at its device's clock and temperature",
                    event="straggler",
                    step=self._step,
                    rank=rank,
                    ratio=ratio,
                )


def own_time(times: StepTimes) -> float:
    """Milliseconds that a rank took for itself."""
    return times.step - times.communication - times.bubble


def slow_ranks(milliseconds: Mapping[int, float], threshold: float) -> dict[int, float]:
    """Rank → how many times the median it took, of those above `threshold`. Of two ranks the quicker is the median."""
    usual = median_low(milliseconds.values())
    return {rank: own / usual for rank, own in milliseconds.items() if own > threshold * usual}


def device_times(events: Iterable) -> StepTimes:
    """The times of a step on a GPU, from the profiler's events."""
    window = None
    others: list[tuple[int, Span, str]] = []
    nccl: list[tuple[int, Span, str]] = []  # stream, span, name
    pipeline: dict[int, list[Span]] = {}  # by stream: what sends and receives span there
    ends: list[int] = []  # of the kernels that a pipeline's pass launched, on each stream
    for event in events:
        on_device = event.device_type() == torch.autograd.DeviceType.CUDA
        titled = event.is_user_annotation()
        if not on_device and not titled:
            continue
        name, span = event.name(), (event.start_ns(), event.end_ns())
        if not on_device:
            window = span if name == MARK else window
        elif not titled and "nccl" in name:
            nccl.append((event.device_resource_id(), span, name))
        elif not titled:
            others.append((event.device_resource_id(), span, name))
        elif name == PASS:
            ends.append(span[1])
        elif name.startswith(PIPELINE_TITLES):
            pipeline.setdefault(event.device_resource_id(), []).append(span)
    direct = {stream for stream, _, name in others if DIRECT in name}
    compute = [span for stream, span, _ in others if stream not in direct]
    copies = [span for stream, span, _ in others if stream in direct]
    collectives, transfers = copies + waits_before(copies, union(compute)), []
    for stream, span, name in nccl:
        own = "SendRecv" in name and any(s <= span[0] and span[1] <= e for s, e in pipeline.get(stream, ()))
        (transfers if own else collectives).append(span)
    return _times(window, compute, collectives, transfers, max(ends, default=None), rest_is_compute=False)


def host_times(events: Iterable) -> StepTimes:
    """The times of a step on a CPU, from the profiler's events."""
    events = list(events)
    mark = next(event for event in events if event.name() == MARK)
    thread = mark.start_thread_id()
    operations: list[Span] = []
    collectives: list[Span] = []
    waits: list[Span] = []
    end = None
    for event in events:
        name, span = event.name(), (event.start_ns(), event.end_ns())
        if name.startswith("aten::") and event.start_thread_id() == thread:
            operations.append(span)
        elif name.startswith("gloo:") and not name.startswith(PIPELINE_TITLES):
            collectives.append(span)
        elif name == WAITS:
            waits.append(span)
        elif name == PASS:
            end = span[1]
    window = (mark.start_ns(), mark.end_ns())
    return _times(window, operations, collectives, waits, end, rest_is_compute=True)


def _times(
    window: Span,
    compute: list[Span],
    collectives: list[Span],
    transfers: list[Span],
    pipeline_end: int | None,
    *,
    rest_is_compute: bool,
) -> StepTimes:
    def within(spans: list[Span]) -> list[Span]:
        begin, end = window
        return union([(max(s, begin), min(e, end)) for s, e in spans if e > begin and s < end])

    busy, talking, waiting = within(compute), within(collectives), within(transfers)
    if rest_is_compute:  # a rank that stands waiting does nothing else
        bubble = length(waiting)
        communication = length(without(talking, union(busy + waiting)))
    else:
        bubble = length(without(waiting, union(busy + talking)))
        communication = length(without(talking, busy))
    step = window[1] - window[0]
    computed = step - bubble - communication if rest_is_compute else length(busy)
    idle = step - computed - communication - bubble
    ended = None if pipeline_end is None else (pipeline_end - window[0]) / 1e6
    return StepTimes(*(value / 1e6 for value in (step, computed, communication, bubble, idle)), ended)


def waits_before(copies: Iterable[Span], compute: list[Span]) -> list[Span]:
    """The idle time before copies that begin while nothing is computed; `compute` is a union."""
    ends = [end for _, end in compute]
    before = [(bisect_right(ends, start), start) for start, _ in copies]
    return [
        (ends[done - 1], start)
        for done, start in before
        if done and (done == len(compute) or compute[done][0] >= start)
    ]


def union(spans: Iterable[Span]) -> list[Span]:
    """The same times in spans that are apart and in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def without(spans: list[Span], taken: list[Span]) -> list[Span]:
    """What of `spans` is not in `taken`; both are unions."""
    left: list[Span] = []
    first = 0
    for start, end in spans:
        while first < len(taken) and taken[first][1] <= start:
            first += 1
        at = first
        while at < len(taken) and taken[at][0] < end:
            if taken[at][0] > start:
                left.append((start, taken[at][0]))
            start = taken[at][1]
            at += 1
        if start < end:
            left.append((start, end))
    return left


def length(spans: Iterable[Span]) -> int:
    return sum(end - start for start, end in spans)


def peak_memory(device: torch.device) -> int:
    """The most that was allocated on the GPU so far, or that the process took of the host, libraries and all: bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def process_age() -> float | None:
    """Seconds since the system started this process; None where it does not tell."""
    started = started_at(os.getpid())
    if started is None:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


class StartClock:
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


class PhaseTimers:
    """Times the phases of each step, by Megatron-LM's names and levels: those above `level` are not timed."""

    LEVELS: ClassVar = {"forward-backward": 1, "optimizer": 1, "batch-generator": 2}

    def __init__(self, device: torch.device, level: int):
        self._clocks = {name: StepClock(device) for name, own in self.LEVELS.items() if own <= level}

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


def timers_text(ranks: Sequence[Mapping[str, float]], option: str) -> str:
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
