"""A note where larger micro-batches fit, so that a step has fewer passes."""

from __future__ import annotations

from megalith.config import RunConfig
from megalith.config.rules.auto_settings import Machine
from megalith.config.rules.parallel_rules import data_parallel_size, shard_size
from megalith.config.train import BatchSizeSchedule
from megalith.errors import ConfigError
from megalith.planner.counts import MetaModel
from megalith.planner.layout import USABLE, fullest, with_auto

ENOUGH = 32_768  # tokens of a micro-batch on a GPU, as many as the benchmarks of GPT-2-large have

PASS_BY_PASS = {
    "optim_grads": "casts weights, reduces gradients and adds them up",
    "optim_grads_params": "gathers and casts weights, reduces gradients and adds them up",
}
"""Strategy → what each micro-batch does of it, where there are shards."""


def micro_batch_notes(config: RunConfig, world_size: int, machine: Machine) -> list[str]:
    """One where a step of several micro-batches could be of fewer that are expected to fit. `config` as it is given,
    before `auto` is chosen, for larger ones may choose otherwise. None where the number of micro-batches does more
    than add up gradients: under a pipeline, and where experts drop tokens of each."""
    train, parallel, model = config.train, config.parallel, config.model
    micro, dp = train.micro_batch_size, data_parallel_size(parallel, world_size)
    passes = BatchSizeSchedule.from_config(train, dp).global_batch_size // (micro * dp)
    if not machine.memory or passes == 1 or parallel.pipeline_model_parallel_size > 1:
        return []
    if model.num_experts is not None and model.moe_expert_capacity_factor is not None:
        return []
    tokens = micro * config.data.seq_length // parallel.context_parallel_size
    sharded, strategy = shard_size(parallel, world_size) > 1, parallel.data_parallel_sharding_strategy
    meta = None
    for times in range(min(passes, ENOUGH // tokens), 1, -1):
        if passes % times:
            continue
        meta = meta or MetaModel(model, config.lora)
        try:
            larger, _ = with_auto(
                config.with_settings({"train.micro_batch_size": times * micro}), world_size, machine, meta
            )
            expected = fullest(larger, world_size, meta)
        except ConfigError:  # of a batch size that grows, by less than these
            continue
        given, again = parallel.recompute_granularity, larger.parallel.recompute_granularity
        cheap = again == "selective" and set(larger.parallel.recompute_modules) <= {"layernorm", "mlp_act"}
        # Gradients over replicas cannot take the place of activations (ReduceScatter): a memory so full is in pieces.
        cheap = cheap and (not sharded or parallel.num_distributed_optimizer_instances == 1)
        gathers_again = larger.parallel.save_gathered_inputs != parallel.save_gathered_inputs
        if expected <= USABLE * machine.memory and (cheap or again == given) and not gathers_again:
            modules = " and ".join(larger.parallel.recompute_modules)
            lowered = f" with {modules} recomputed" if again != given else ""
            each = "casts weights and adds gradients up"
            if sharded:
                each = PASS_BY_PASS.get(strategy, each)
            return [
                f"train.micro_batch_size {times * micro} is expected to fit{lowered} ({expected / 1e9:.1f} GB on a GPU "
                f"of {machine.memory / 1e9:.1f}): try it, for each of a step's {passes} micro-batches {each}"
            ]
    return []
