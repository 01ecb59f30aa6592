"""What a run with a pipeline has to be like, checked before any process group is made."""

from __future__ import annotations

from collections.abc import Iterable

from megalith.config import RunConfig
from megalith.errors import ConfigError
from megalith.parallel.pipeline.simulate import few_micro_batches_warning
from megalith.parallel.pipeline.stages import assign_layers, run_schedule, schedule_kind, virtual_size


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
    if stages == 1 and parallel.microbatch_group_size_per_virtual_pipeline_stage:
        raise ConfigError(
            f"microbatch_group_size_per_virtual_pipeline_stage is "
            f"{parallel.microbatch_group_size_per_virtual_pipeline_stage}, but there is only one pipeline rank; raise "
            "pipeline_model_parallel_size to 2 or more, or leave it out"
        )
    assign_layers(config.model, parallel)
    if stages == 1:
        return []
    if schedule_kind(parallel) == "zero_bubble":
        _check_zero_bubble(config)
    schedules = [run_schedule(parallel, count) for count in sorted(set(micro_batches))]
    return [warning for schedule in schedules if (warning := few_micro_batches_warning(schedule))]


def _check_zero_bubble(config: RunConfig) -> None:
    parallel = config.parallel
    if parallel.data_parallel_sharding_strategy in ("optim_grads", "optim_grads_params"):
        raise ConfigError(
            f"data_parallel_sharding_strategy {parallel.data_parallel_sharding_strategy} reduces gradients behind each "
            "micro-batch's backward pass, where pipeline_schedule zero_bubble has not made those of the weights yet; "
            "use the strategy optim, or pipeline_schedule 1f1b"
        )
    recomputed = parallel.recompute_granularity == "full" or (
        parallel.recompute_granularity == "selective" and "mlp" in parallel.recompute_modules
    )
    if recomputed:
        raise ConfigError(
            f"recompute_granularity {parallel.recompute_granularity} drops the inputs of linear layers, which "
            "pipeline_schedule zero_bubble saves for wgrad; recompute core_attn or layernorm only, "
            "or use pipeline_schedule 1f1b"
        )
    if config.runtime.compile is True:
        raise ConfigError(
            "runtime.compile is true, but compiled layers make all their gradients in one go, which pipeline_schedule "
            "zero_bubble takes apart; set it to false, or pipeline_schedule to 1f1b"
        )
