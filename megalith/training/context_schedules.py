"""Schedules of a run's steps under dynamic context parallelism."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from megalith.comm.collectives import Axis
from megalith.config import RunConfig
from megalith.data.chat.chat_dataset import ChatDataset
from megalith.data.dynamic_context import (
    ContextGroup,
    RankLimits,
    StepSchedule,
    schedule_step,
    with_padding,
)
from megalith.data.order import SampleOrder
from megalith.parallel.pipeline.stages import padded_micro_batches
from megalith.planner.pass_costs import pass_costs

KEPT = 16
"""Number of schedules to keep, enough for the prefetched steps and an evaluation."""


class ContextSchedules:
    """Schedules of the global batches of a run, the same on every rank.

    Args:
        config: the run.
        dp_cp: the data × context ranks.
    """

    def __init__(self, config: RunConfig, dp_cp: Axis):
        parallel = config.parallel
        self._rank, self._costs = dp_cp.rank, pass_costs(config)
        shards = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
        self.limits = RankLimits(
            ranks=dp_cp.size,
            max_tokens=config.tokens_per_pass,
            multiple=2 * shards,
            min_degree=parallel.min_dynamic_context_parallel_size,
        )
        self._padded = partial(padded_micro_batches, parallel)
        self._kept: OrderedDict[tuple[int, int, int], StepSchedule] = OrderedDict()

    def forget(self) -> None:
        """Forget the schedules, because the order of samples changes."""
        self._kept.clear()

    def of_batch(self, rows: ChatDataset, order: SampleOrder, batch: range) -> StepSchedule:
        """Return the schedule of a step whose samples have the positions `batch` in the run.

        Its groups identify sequences by their index in the dataset.
        """
        key = id(rows), batch.start, batch.stop
        if key not in self._kept:
            members = [sequence for position in batch for sequence in rows.sequences(order(position))]
            schedule = schedule_step(rows.samples.lengths[members], self.limits, self._costs)
            schedule = with_padding(schedule, self._padded(len(schedule.passes)), self.limits)
            self._kept[key] = replace(
                schedule,
                passes=tuple(
                    tuple(
                        replace(each, sequences=tuple(members[i] for i in each.sequences)) for each in groups
                    )
                    for groups in schedule.passes
                ),
            )
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return self._kept[key]

    def describe(self, schedules: Sequence[StepSchedule]) -> str:
        """Return a note on the schedules of several steps: number of forward passes, group sizes and load balance."""
        groups = [group for each in schedules for groups in each.passes for group in groups]
        ranks, degrees = self.limits.ranks, sorted({group.degree for group in groups if group.sequences})
        busy = sum(group.degree for group in groups if group.sequences)
        shares = (
            f"{degree} ({100 * sum(g.degree for g in groups if g.sequences and g.degree == degree) / busy:.0f} %)"
            for degree in degrees
        )
        ideal = sum(each.work for each in schedules) / ranks
        return (
            f"parallel.dynamic_context_parallel: {self.limits.room:,} tokens per rank and pass; the first "
            f"{len(schedules)} steps have {sum(len(each.passes) for each in schedules) / len(schedules):.1f} passes on "
            f"average; ranks per group: {', '.join(shares)}; cost of a step: "
            f"{sum(each.cost for each in schedules) / ideal:.3f} × that of a perfectly even split over {ranks} ranks"
        )

    def rows_of_rank(self, rows: ChatDataset, order: SampleOrder, batch: range) -> Sequence[ContextGroup]:
        """Return this rank's sequences in each forward pass of a global batch, as dataset indices."""
        return self.of_batch(rows, order, batch).of_rank(self._rank)
