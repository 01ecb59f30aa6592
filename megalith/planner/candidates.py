"""Candidates for the layout search: mesh sizes, micro-batch sizes, pipeline splits, sharding and recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megalith.config import RunConfig
from megalith.parallel.pipeline.stage_layout import suggested_layout

MAX_MICRO_BATCH = 2**16  # tokens
MIN_CONTEXT_SHARD = 2048  # tokens of a sequence per context-parallel rank
PARALLEL = "parallel."
SEARCHED_DEFAULTS = {  # defaults of the settings that the search chooses
    PARALLEL + name: value
    for name, value in {
        "tensor_model_parallel_size": 1, "sequence_parallel": False, "save_gathered_inputs": True,
        "pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None,
        "microbatch_group_size_per_virtual_pipeline_stage": None, "pipeline_schedule": "1f1b",
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None, "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False, "pipeline_model_parallel_layout": None,
        "context_parallel_size": 1, "cp_comm_type": "auto", "hierarchical_context_parallel_sizes": None,
        "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1,
        "data_parallel_sharding_strategy": "no_shard", "num_distributed_optimizer_instances": 1,
        "recompute_granularity": None, "recompute_method": None, "recompute_num_layers": 1,
        "recompute_modules": ["core_attn"], "distribute_saved_activations": False, "cpu_offloading_num_layers": 0,
        "tp_comm_overlap": "auto", "fsdp_unsharded_layers": "auto", "symmetric_memory_groups": "auto",
    }.items()
}  # fmt: skip
# Settings whose `auto` depends on the device's memory (planner/layout.py), grouped by choice.
BY_MEMORY = (
    (PARALLEL + "recompute_granularity", PARALLEL + "recompute_modules", PARALLEL + "save_gathered_inputs"),
    (PARALLEL + "recompute_saves_attention",), (PARALLEL + "moe_static_dispatch",),
    (PARALLEL + "fsdp_unsharded_layers",), ("train.fp8_cache_weights",), ("train.moe_cache_weights",),
)  # fmt: skip
# In order of cost.
ACTIVATIONS = {"recompute_granularity": "selective", "recompute_modules": ["mlp_act"]}
NO_GEMM = {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp_act"]}
SHARDS = {"save_gathered_inputs": False}  # under SP
CHEAP = [ACTIVATIONS, NO_GEMM]  # cheaper than gathering FSDP layers again
RECOMPUTED: list[dict[str, Any]] = [
    {},
    ACTIVATIONS,
    NO_GEMM,
    SHARDS,
    NO_GEMM | SHARDS,
    {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]},
    {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"], **SHARDS},
    {"recompute_granularity": "full", "recompute_method": "uniform"},
]
# Tried in this order if nothing fits otherwise.
OFFLOADED = {"optim.optimizer_cpu_offload": True, "optim.optimizer_offload_fraction": 1.0}
REDUCED = [{"optim.exp_avg_dtype": dtype, "optim.exp_avg_sq_dtype": dtype} for dtype in ("bf16", "fp8")]


def candidates(config: RunConfig, world_size: int, gpus_per_node: int) -> Iterator[dict[str, Any]]:
    """Yield the settings ("section.field" → value) of each layout to try, without recomputation."""
    for sizes in _sizes(config, world_size, gpus_per_node):
        for rest in _batching_and_sharding(config, world_size, sizes):
            yield sizes | rest


def least_batch(config: RunConfig, world_size: int, gpus_per_node: int) -> int:
    """Return the smallest global batch size that some layout accepts.

    That is one sequence per replica and, with a pipeline, one micro-batch per stage.
    """
    sizes = (list(sizes.values()) for sizes in _sizes(config, world_size, gpus_per_node))
    heads = config.model.num_attention_heads
    return min(world_size // (tensor * context) for tensor, _, context, *_ in sizes if heads % tensor == 0)


def _sizes(config: RunConfig, world_size: int, gpus_per_node: int) -> Iterator[dict[str, Any]]:
    """Yield (tensor, context, pipeline, expert) parallel sizes whose product divides the world size."""
    model, seq, experts = config.model, config.data.seq_length, config.model.num_experts
    for tensor in _divisors(world_size, most=gpus_per_node):
        for context in _divisors(world_size // tensor, most=max(seq // MIN_CONTEXT_SHARD, 1)):
            if context & (context - 1) or seq % (tensor * (2 * context if context > 1 else 1)):
                continue
            for pipeline in _divisors(world_size // tensor // context, most=model.num_layers + 2):
                stage = world_size // pipeline
                for expert in (
                    [e for e in _divisors(stage, most=experts) if experts % e == 0] if experts else [1]
                ):
                    yield {
                        PARALLEL + "tensor_model_parallel_size": tensor,
                        PARALLEL + "sequence_parallel": tensor > 1,
                        PARALLEL + "context_parallel_size": context,
                        PARALLEL + "pipeline_model_parallel_size": pipeline,
                        PARALLEL + "expert_model_parallel_size": expert,
                    }


def _batching_and_sharding(
    config: RunConfig, world_size: int, sizes: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield micro-batch sizes, pipeline splits and sharding strategies."""
    tensor, _, context, pipeline, _ = sizes.values()
    ranks = world_size // (tensor * pipeline)
    dp, batch = ranks // context, config.train.global_batch_size
    if batch % dp:
        return
    longest = max(MAX_MICRO_BATCH * context // config.data.seq_length, 1)
    micros = [2**power for power in range(7) if 2**power <= longest and batch // dp % 2**power == 0]
    strategies = ["no_shard"] if ranks == 1 else ["optim", "no_shard"]
    if ranks > 1 and pipeline == 1:
        strategies += ["optim_grads", "optim_grads_params"]
    for micro in micros:
        for split in _splits(config.model.num_layers, pipeline, batch // dp // micro):
            for strategy in strategies:
                yield {
                    "train.micro_batch_size": micro,
                    PARALLEL + "data_parallel_sharding_strategy": strategy,
                    **{PARALLEL + name: value for name, value in split.items()},
                }


def _splits(layers: int, pipeline: int, micro_batches: int) -> Iterator[dict[str, Any]]:
    """Yield assignments of layers to stages, and schedules."""
    if pipeline == 1:
        yield {}
        return
    if micro_batches < pipeline:
        return
    is_even = False
    ends = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    for counted, accounts in ((0, {}), (2, ends)):
        if (layers + counted) % pipeline:
            continue
        each, is_even = (layers + counted) // pipeline, True
        for virtual in _divisors(each, most=10):
            if virtual == 1:
                if not counted or pipeline > 2:  # with two stages both accounts give the even split
                    yield accounts
                if not counted:
                    yield {"pipeline_schedule": "zero_bubble"}
            elif micro_batches % pipeline == 0:
                yield accounts | {"virtual_pipeline_model_parallel_size": virtual}
    if not is_even:
        yield {"pipeline_model_parallel_layout": suggested_layout(layers, pipeline)}


def _divisors(value: int, most: int | None = None) -> list[int]:
    return [size for size in range(1, min(value, most or value) + 1) if value % size == 0]
