"""Suggests larger micro-batches if they fit, because a step then needs fewer forward and backward passes."""

from __future__ import annotations

from megalith.config import RunConfig
from megalith.config.rules.auto_settings import Machine
from megalith.config.rules.parallel_rules import data_parallel_size, shard_size
from megalith.config.train import BatchSizeSchedule
from megalith.errors import ConfigError
from megalith.planner.counts import MetaModel
from megalith.planner.layout import fullest
from megalith.planner.memory_choices import USABLE, with_auto

MAX_TOKENS = 32_768  # per micro-batch and GPU, as in the GPT-2-large benchmarks

PASS_BY_PASS = {
    "optim_grads": "casts weights, and reduces and accumulates gradients",
    "optim_grads_params": "gathers and casts weights, and reduces and accumulates gradients",
}
"""Work that every micro-batch repeats, by sharding strategy."""


def micro_batch_notes(config: RunConfig, world_size: int, machine: Machine) -> list[str]:
    """Return a note if a step could have fewer, larger micro-batches that are expected to fit.

    There is no note with a pipeline, whose bubble depends on the number of micro-batches, with an expert capacity,
    which applies per micro-batch, or with dynamic context parallelism, which chooses the size of a pass itself.

    Args:
        config: the run before `auto` is resolved, because larger micro-batches may resolve it differently.
        world_size: number of processes.
        machine: the devices of the run.
    """
    train, parallel, model = config.train, config.parallel, config.model
    micro, dp = train.micro_batch_size, data_parallel_size(parallel, world_size)
    passes = BatchSizeSchedule.from_config(train, dp).global_batch_size // (micro * dp)
    if not machine.memory or passes == 1 or parallel.pipeline_model_parallel_size > 1:
        return []
    if model.num_experts is not None and model.moe_expert_capacity_factor is not None:
        return []
    if parallel.dynamic_context_parallel:  # parallel.max_seqlen_per_dp_cp_rank decides the size of a pass
        return []
    tokens = micro * config.data.seq_length // parallel.context_parallel_size
    sharded, strategy = shard_size(parallel, world_size) > 1, parallel.data_parallel_sharding_strategy
    meta = None
    for times in range(min(passes, MAX_TOKENS // tokens), 1, -1):
        if passes % times:
            continue
        meta = meta or MetaModel(model, config.lora)
        try:
            larger, _ = with_auto(
                config.with_settings({"train.micro_batch_size": times * micro}), world_size, machine, meta
            )
            expected = fullest(larger, world_size, meta)
        except ConfigError:  # batch size ramp-up with a smaller increment
            continue
        before, after = parallel.recompute_granularity, larger.parallel.recompute_granularity
        cheap = after == "selective" and set(larger.parallel.recompute_modules) <= {"layernorm", "mlp_act"}
        # With replicas, gradients cannot reuse the memory of activations (ReduceScatter): full memory fragments.
        cheap = cheap and (not sharded or parallel.num_distributed_optimizer_instances == 1)
        gathers_again = larger.parallel.save_gathered_inputs != parallel.save_gathered_inputs
        if expected <= USABLE * machine.memory and (cheap or after == before) and not gathers_again:
            modules = " and ".join(larger.parallel.recompute_modules)
            lowered = f" with {modules} recomputed" if after != before else ""
            each = "casts weights and accumulates gradients"
            if sharded:
                each = PASS_BY_PASS.get(strategy, each)
            return [
                f"try train.micro_batch_size {times * micro}, which is expected to fit{lowered} "
                f"({expected / 1000000000.0:.1f} GB on a GPU of {machine.memory / 1000000000.0:.1f}): each of a "
                f"step's {passes} micro-batches {each}"
            ]
    return []
