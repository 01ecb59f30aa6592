"""What a run with a pipeline has to be like, checked before any process group is made."""

from __future__ import annotations

from collections.abc import Iterable

from megalith.config import RunConfig
from megalith.config.rules.parallel_rules import data_parallel_size
from megalith.config.rules.run_rules import check_training
from megalith.config.train import BatchSizeSchedule
from megalith.errors import ConfigError
from megalith.parallel.pipeline.schedules import check_schedule
from megalith.parallel.pipeline.simulate import few_micro_batches_warning
from megalith.parallel.pipeline.stages import assign_layers, run_schedule, schedule_kind, virtual_size


def check_layout(config: RunConfig, world_size: int) -> list[str]:
    """Raises ConfigError unless the run can be trained on `world_size` processes: the trainer and the planner ask here.

    Returns the warnings to show.
    """
    check_training(config, world_size)
    dp = data_parallel_size(config.parallel, world_size)
    return check_pipeline(config, BatchSizeSchedule.from_config(config.train, dp).all_micro_batches)


def check_pipeline(config: RunConfig, micro_batches: Iterable[int]) -> list[str]:
    """Raises ConfigError unless stages and schedule can be made for each of these numbers of micro-batches a step.

    Returns the warnings to show, of steps with fewer micro-batches than stages.
    """
    parallel = config.parallel
    stages, virtual = parallel.pipeline_model_parallel_size, virtual_size(parallel)
    if stages == 1 and virtual > 1:
        raise ConfigError(
            f"virtual_pipeline_model_parallel_size is {virtual}, but there is only one pipeline rank; raise "
            "pipeline_model_parallel_size to 2 or more, or leave it out"
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
