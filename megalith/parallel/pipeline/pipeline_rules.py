"""Checks of a run's layout and pipeline, before any process group is created."""

from __future__ import annotations

from collections.abc import Iterable

from megalith.config import RunConfig
from megalith.config.rules.parallel_rules import data_parallel_size
from megalith.config.rules.run_rules import check_training
from megalith.config.train import BatchSizeSchedule
from megalith.errors import ConfigError
from megalith.parallel.pipeline.schedules import check_schedule
from megalith.parallel.pipeline.simulate import few_micro_batches_warning
from megalith.parallel.pipeline.stages import (
    assign_layers,
    padded_micro_batches,
    run_schedule,
    schedule_kind,
    virtual_size,
)


def check_layout(config: RunConfig, world_size: int) -> list[str]:
    """Check that a run can be trained on `world_size` processes. Trainer and planner share this check.

    Returns:
        Warnings to print.

    Raises:
        ConfigError: the layout is not valid.
    """
    check_training(config, world_size)
    dp = data_parallel_size(config.parallel, world_size)
    counts = BatchSizeSchedule.from_config(config.train, dp).all_micro_batches
    if config.parallel.dynamic_context_parallel:  # the number of passes depends on the data, and is padded
        counts = [padded_micro_batches(config.parallel, config.parallel.pipeline_model_parallel_size)]
    return check_pipeline(config, counts)


def check_pipeline(config: RunConfig, micro_batches: Iterable[int]) -> list[str]:
    """Check stages and schedule for each of these numbers of micro-batches per step.

    Returns:
        Warnings about steps with fewer micro-batches than stages.

    Raises:
        ConfigError: the layers cannot be split, or the schedule does not support a number of micro-batches.
    """
    parallel = config.parallel
    stages, virtual = parallel.pipeline_model_parallel_size, virtual_size(parallel)
    if stages == 1 and virtual > 1:
        raise ConfigError(
            f"virtual_pipeline_model_parallel_size is {virtual}, but there is only one pipeline rank; raise "
            "pipeline_model_parallel_size to 2 or more, or leave virtual_pipeline_model_parallel_size out"
        )
    assign_layers(config.model, parallel)
    if stages == 1:
        return []
    kind, group = schedule_kind(parallel), parallel.microbatch_group_size_per_virtual_pipeline_stage
    counts = sorted(set(micro_batches))
    for count in counts:
        check_schedule(kind, stages, count, virtual, group)
    few = [run_schedule(parallel, count) for count in counts if count < stages]
    return [warning for schedule in few if (warning := few_micro_batches_warning(schedule))]
