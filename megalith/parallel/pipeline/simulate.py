"""Simulates a schedule: each action starts as soon as its rank is free and its input has arrived.

The bubble is the fraction of a step in which ranks wait. For equal stages and free transfers it has a formula. With F,
I, W the durations of forward, dgrad and wgrad of a rank, S ranks, M micro-batches and V chunks per rank, a step takes
M·(F + I + W) plus

- 1f1b: (S − 1)·(F + I + W), so the bubble is (S − 1) / (M + S − 1) of the step, for any M;
- interleaved: (S − 1)·(F + I + W) / V, so the bubble is (S − 1) / (V·M + S − 1) of the step;
- zero_bubble: (S − 1)·(F + I − W), for M ≥ S and W no longer than F or I. If F, I and W are equal, that is a third of
  the time in 1f1b.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megalith.parallel.pipeline.schedules import Kind, Schedule
from megalith.parallel.pipeline.timeline import Span, Timeline


@dataclass(frozen=True)
class Durations:
    """Durations of the actions of a stage (one chunk of one rank), in any unit of time."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    p2p: float = 0.0
    """Time from the end of an action to the arrival of its output at the next stage."""

    def of(self, kind: Kind) -> float:
        return {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward_input + self.backward_weight,
            Kind.BACKWARD_INPUT: self.backward_input,
            Kind.BACKWARD_WEIGHT: self.backward_weight,
        }[kind]


def simulate(schedule: Schedule, durations: Durations | Sequence[Durations] = Durations()) -> Timeline:
    """Return the timeline of a schedule.

    Transfers do not block their sender. The schedule must be free of deadlock.

    Args:
        schedule: actions of every rank, in order.
        durations: durations of one stage, if all are equal, or of each stage in the order of the model.
    """
    count = schedule.stages * schedule.virtual
    by_stage = [durations] * count if isinstance(durations, Durations) else list(durations)
    assert len(by_stage) == count, f"{len(by_stage)} durations for {count} stages"
    arrival: dict[tuple, float] = {}  # arrival time of the input of (is forward, micro-batch, rank, chunk)
    spans: list[list[Span]] = [[] for _ in range(schedule.stages)]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            done = spans[rank]
            while len(done) < len(actions):
                action = actions[len(done)]
                forward = action.kind is Kind.FORWARD
                needs_input = schedule.source(rank, action) is not None
                if needs_input and (forward, action.micro_batch, rank, action.chunk) not in arrival:
                    break
                ready = arrival[forward, action.micro_batch, rank, action.chunk] if needs_input else 0.0
                start = max(ready, done[-1].end if done else 0.0)
                duration = by_stage[action.chunk * schedule.stages + rank]
                end = start + duration.of(action.kind)
                done.append(Span(rank, action, start, end))
                if target := schedule.target(rank, action):
                    arrival[forward, action.micro_batch, *target] = end + duration.p2p
                moved = True
    assert all(len(s) == len(a) for s, a in zip(spans, schedule.actions)), "the schedule deadlocks"
    return Timeline(spans)


def few_micro_batches_warning(schedule: Schedule) -> str | None:
    """Return a warning that gives the bubble if a step has fewer micro-batches than ranks, otherwise None."""
    if schedule.micro_batches >= schedule.stages:
        return None
    bubble = simulate(schedule).bubble
    return (
        f"{schedule.micro_batches} micro-batches per step are fewer than the {schedule.stages} pipeline stages: the "
        f"ranks wait {bubble:.0%} of the time (the pipeline's bubble, schedule {schedule.kind}); raise "
        f"global_batch_size or lower micro_batch_size for at least {schedule.stages} micro-batches"
    )
