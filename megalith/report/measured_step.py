"""Time of one step on this rank, split into compute, exposed communication, pipeline bubble and idle time.

The step runs under torch's profiler. On a GPU the spans of kernels on the device are overlaid:

    compute         a kernel runs that is neither NCCL's nor on a stream that copies from other GPUs (copy_engine.py)
    communication   only NCCL's kernels or copies from other GPUs run (exposed), except a pipeline's sends and receives.
                    Idle time directly before a copy counts too: the stream waits for another rank's flag, without a
                    kernel
    bubble          only a pipeline's sends and receives run: the rank waits for another stage
    idle            nothing runs: the device waits for the host

On a CPU, communication is the time of gloo's collectives minus the operations that the rank computed meanwhile, the
bubble is the time that the pipeline waited for a receive, and the rest is compute. The ranks synchronize with each
other before the step, and each with its device after it, so the step itself causes the time that a rank waits in a
collective.
"""

from __future__ import annotations

import os
import resource
import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megalith.comm.collectives import Axis
from megalith.parallel.pipeline.executor import PASS, WAITS

MARK = "megalith: the measured step"
DIRECT = "PtoP"  # in the names of copies from another GPU
PIPELINE_ANNOTATIONS = ("nccl:send", "nccl:recv", "gloo:send", "gloo:recv")

Span = tuple[int, int]  # start and end, nanoseconds


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of one step on one rank. The four phases sum to `step`."""

    step: float
    compute: float
    communication: float
    bubble: float
    idle: float
    pipeline_end: float | None = None
    """End of this rank's last pipeline action, counted from the start of the step."""


def move_final_wait_to_bubble(times: Sequence[StepTimes]) -> list[StepTimes]:
    """Count the final wait of a pipeline's ranks as bubble instead of communication.

    A rank that has finished its pipeline actions waits for the others in the next collective, which reduces the loss.
    """
    ends = [each.pipeline_end for each in times]
    if None in ends:
        return list(times)
    waits = [min(max(ends) - each.pipeline_end, each.communication) for each in times]
    return [
        replace(each, communication=each.communication - wait, bubble=each.bubble + wait)
        for each, wait in zip(times, waits)
    ]


class StepMeasurement:
    """Measures one step: `start` before it and `stop` after it, on every rank of `world`."""

    def __init__(self, device: torch.device, world: Axis):
        self._device, self._world = device, world

    def start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences notices between the log lines
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
        # profile.events() takes minutes for a large step. These are the raw events from which it builds its list.
        events = self._profile.profiler.kineto_results.events()
        return device_times(events) if self._device.type == "cuda" else host_times(events)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def device_times(events: Iterable) -> StepTimes:
    """Return the times of a step on a GPU, from the profiler's events."""
    window = None
    others: list[tuple[int, Span, str]] = []
    nccl: list[tuple[int, Span, str]] = []  # stream, span, name
    pipeline: dict[int, list[Span]] = {}  # stream → spans of sends and receives
    ends: list[int] = []  # of the kernels launched by pipeline passes
    for event in events:
        on_device = event.device_type() == torch.autograd.DeviceType.CUDA
        is_annotation = event.is_user_annotation()
        if not on_device and not is_annotation:
            continue
        name, span = event.name(), (event.start_ns(), event.end_ns())
        if not on_device:
            window = span if name == MARK else window
        elif not is_annotation and "nccl" in name:
            nccl.append((event.device_resource_id(), span, name))
        elif not is_annotation:
            others.append((event.device_resource_id(), span, name))
        elif name == PASS:
            ends.append(span[1])
        elif name.startswith(PIPELINE_ANNOTATIONS):
            pipeline.setdefault(event.device_resource_id(), []).append(span)
    direct = {stream for stream, _, name in others if DIRECT in name}
    compute = [span for stream, span, _ in others if stream not in direct]
    copies = [span for stream, span, _ in others if stream in direct]
    collectives, transfers = copies + waits_before(copies, union(compute)), []
    for stream, span, name in nccl:
        is_transfer = "SendRecv" in name and any(
            start <= span[0] and span[1] <= end for start, end in pipeline.get(stream, ())
        )
        (transfers if is_transfer else collectives).append(span)
    return _times(window, compute, collectives, transfers, max(ends, default=None), rest_is_compute=False)


def host_times(events: Iterable) -> StepTimes:
    """Return the times of a step on a CPU, from the profiler's events."""
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
        elif name.startswith("gloo:") and not name.startswith(PIPELINE_ANNOTATIONS):
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
    if rest_is_compute:  # a waiting rank computes nothing
        bubble = total_length(waiting)
        communication = total_length(subtract(talking, union(busy + waiting)))
    else:
        bubble = total_length(subtract(waiting, union(busy + talking)))
        communication = total_length(subtract(talking, busy))
    step = window[1] - window[0]
    computed = step - bubble - communication if rest_is_compute else total_length(busy)
    idle = step - computed - communication - bubble
    ended = None if pipeline_end is None else (pipeline_end - window[0]) / 1e6
    return StepTimes(*(value / 1e6 for value in (step, computed, communication, bubble, idle)), ended)


def waits_before(copies: Iterable[Span], compute: list[Span]) -> list[Span]:
    """Return the idle time before copies that begin while nothing is computed. `compute` has no overlapping spans
    (`union`).
    """
    ends = [end for _, end in compute]
    before = [(bisect_right(ends, start), start) for start, _ in copies]
    return [
        (ends[done - 1], start)
        for done, start in before
        if done and (done == len(compute) or compute[done][0] >= start)
    ]


def union(spans: Iterable[Span]) -> list[Span]:
    """Merge overlapping spans, sorted by start."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def subtract(spans: list[Span], removed: list[Span]) -> list[Span]:
    """Return `spans` without `removed`. Both are unions of intervals."""
    rest: list[Span] = []
    first = 0
    for start, end in spans:
        while first < len(removed) and removed[first][1] <= start:
            first += 1
        at = first
        while at < len(removed) and removed[at][0] < end:
            if removed[at][0] > start:
                rest.append((start, removed[at][0]))
            start = removed[at][1]
            at += 1
        if start < end:
            rest.append((start, end))
    return rest


def total_length(spans: Iterable[Span]) -> int:
    return sum(end - start for start, end in spans)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: allocated on the GPU, or the resident set of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
