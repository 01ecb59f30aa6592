"""Derive layout, batch size, sharding, recomputation and offloading from Oumi's keys.

Each function sets one group of settings. Keys that contradict each other or the layout become problems.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megalith.dialects.oumi.oumi_grpo import num_generations
from megalith.dialects.oumi.oumi_keys import ACTOR, VERL_PREFIX
from megalith.dialects.oumi.oumi_values import OumiKeys

ACTOR_MEGATRON = f"{ACTOR}megatron."
TRANSFORMER_OVERRIDE = f"{ACTOR_MEGATRON}override_transformer_config."
LAYOUT = {  # axis in error messages → key
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
}
STRATEGIES = {  # FSDP's sharding_strategy → data_parallel_sharding_strategy
    "FULL_SHARD": "optim_grads_params",
    "HYBRID_SHARD": "optim_grads_params",
    "SHARD_GRAD_OP": "optim_grads",
    "HYBRID_SHARD_ZERO2": "optim_grads",
    "NO_SHARD": "no_shard",
}
STAGES = {"ZERO_0": "no_shard", "ZERO_1": "optim", "ZERO_2": "optim_grads", "ZERO_3": "optim_grads_params"}


def set_layout(keys: OumiKeys) -> int:
    """Set the model-parallel sizes and return TP × PP × CP."""
    sizes = {
        axis: keys.value_of(f"megatron.{key}", f"{ACTOR_MEGATRON}{key}", default=1)
        for axis, key in LAYOUT.items()
    }
    for axis, size in sizes.items():
        keys.set(f"parallel.{LAYOUT[axis]}", size)
    product = math.prod(sizes.values())
    if keys.world_size and keys.world_size % product:
        keys.problems.append(indivisible_world_size(keys.world_size, sizes))
    if sizes["tensor"] > 1 and f"{ACTOR_MEGATRON}sequence_parallel" not in keys:
        keys.set("parallel.sequence_parallel", True)
    tp, pp = sizes["tensor"], sizes["pipeline"]
    _experts(keys, product, tp)
    name = "virtual_pipeline_model_parallel_size"
    total = keys.value_of(f"megatron.{name}", default=None)
    if total is not None and (pp == 1 or total % pp):
        keys.problems.append(
            f"megatron.{name} is {total}, the virtual stages of all ranks, which must be divisible by "
            f"pipeline_model_parallel_size ({pp}), and that must be above 1; set megatron.{name} to "
            f"{2 * pp if pp > 1 else 'none'}"
        )
    elif total is not None:
        keys.set(f"parallel.{name}", total // pp)
        keys.notes.append(
            f"megatron.{name} {total} / {pp} pipeline ranks = {total // pp} "
            f"{'chunk' if total == pp else 'chunks'} of layers per rank"
        )
    chunks = keys[f"{ACTOR_MEGATRON}{name}"]  # verl and Megatron count the stages of one rank
    if chunks is not None and total not in (None, chunks * pp):
        keys.problems.append(
            f"megatron.{name} is {total}, the virtual stages of all {pp} ranks, but {ACTOR_MEGATRON}{name} is "
            f"{chunks} per rank, {chunks * pp} in all; make the two equal, or leave one of them out"
        )
    elif chunks is not None:
        keys.set(f"parallel.{name}", chunks)
    return product


def indivisible_world_size(world_size: int, sizes: Mapping[str, int]) -> str:
    """Return the error message for a world size that the model-parallel sizes do not divide."""
    factors = " × ".join(f"{axis} ({size})" for axis, size in sizes.items())
    product = math.prod(sizes.values())
    return (
        f"world_size ({world_size}) must be divisible by the product of all model parallel sizes ({product}): "
        f"{factors}; start a multiple of {product} processes, or lower megatron.{LAYOUT['tensor']} or "
        f"{LAYOUT['pipeline']}"
    )


def _experts(keys: OumiKeys, product: int, tp: int) -> None:
    ep = keys.value_of(
        "megatron.expert_model_parallel_size", f"{ACTOR_MEGATRON}expert_model_parallel_size", default=1
    )
    etp = keys.value_of(
        "megatron.expert_tensor_parallel_size", f"{ACTOR_MEGATRON}expert_tensor_parallel_size", default=None
    )
    if ep == 1 and etp in (None, 1):
        return
    etp = tp if etp is None else etp
    keys.set("parallel.expert_model_parallel_size", ep)
    keys.set("parallel.expert_tensor_parallel_size", etp)
    world = keys.world_size or product * ep
    keys.notes.append(
        f"expert parallelism uses the ranks of the other axes: on {world} GPUs the dense layers have "
        f"{world // product} replicas (world / TP·PP·CP), which split the batch; Oumi's branch counts "
        f"{world / product / ep:g} (world / TP·PP·CP·EP)"
    )


def _replicas(keys: OumiKeys, parallel: int) -> int:
    return max(1, (keys.world_size or parallel) // parallel)


def set_batch(keys: OumiKeys, trainer: str, parallel: int) -> None:
    """Set micro-batch and global batch in sequences, and GRPO's mini-batches. `parallel`: TP × PP × CP."""
    per_device, accumulated = "training.per_device_train_batch_size", "training.gradient_accumulation_steps"
    default = 1 if trainer == "grpo" else keys[per_device]
    micro_batch = keys.value_of(
        "megatron.micro_batch_size", per_device, f"{ACTOR}ppo_micro_batch_size_per_gpu", default=default
    )
    replicas, accumulation = _replicas(keys, parallel), keys[accumulated]
    by_steps = micro_batch * accumulation * replicas
    group_size = num_generations(keys) if trainer == "grpo" else 1
    global_batch = keys["megatron.global_batch_size"]
    mini_batch = keys[f"{ACTOR}ppo_mini_batch_size"] if trainer == "grpo" else None
    if mini_batch is not None:
        global_batch = keys.value_of("megatron.global_batch_size", default=mini_batch * group_size)
        rollouts = keys.value_of(f"{VERL_PREFIX}data.train_batch_size", default=mini_batch)
        if rollouts % mini_batch or global_batch != mini_batch * group_size:
            keys.problems.append(
                f"verl's data.train_batch_size ({rollouts} prompts) must be divisible by ppo_mini_batch_size "
                f"({mini_batch}), and megatron.global_batch_size must be {mini_batch} × {group_size} = "
                f"{mini_batch * group_size} sequences, but it is {global_batch}; change one of these sizes"
            )
        keys.set("rl.mini_batches", max(1, rollouts // mini_batch))
    elif trainer == "grpo" and f"{VERL_PREFIX}data.train_batch_size" in keys and global_batch is None:
        global_batch = keys[f"{VERL_PREFIX}data.train_batch_size"] * group_size
    if global_batch is not None and accumulated in keys and global_batch != by_steps:
        keys.problems.append(
            f"megatron.global_batch_size is {global_batch}, but micro_batch_size ({micro_batch}) × {accumulated} "
            f"({accumulation}) × data parallel ({replicas}) = {by_steps}; make the two equal, or leave one of them "
            "out"
        )
    global_batch = by_steps if global_batch is None else global_batch
    keys.set("train.micro_batch_size", micro_batch)
    keys.set("train.global_batch_size", global_batch)
    if trainer != "grpo":
        return
    if global_batch % group_size:
        keys.problems.append(
            f"the global batch of {global_batch} sequences is not divisible by num_generations ({group_size}), the "
            f"size of a group; set gradient_accumulation_steps so that micro_batch_size ({micro_batch}) × accumulation "
            f"× data parallel ({replicas}) is a multiple of {group_size}, or set megatron.global_batch_size"
        )
    prompts, unit = global_batch // group_size, "replica" if replicas == 1 else "replicas"
    keys.notes.append(
        f"{prompts} {'prompt' if prompts == 1 else 'prompts'} × {group_size} completions = {global_batch} "
        f"sequences per step, in micro-batches of {micro_batch} on {replicas} data-parallel {unit}"
    )


def set_sharding(keys: OumiKeys, trainer: str, parallel: int) -> None:
    """Set data_parallel_sharding_strategy from the FSDP or DeepSpeed section. `parallel`: TP × PP × CP."""
    replicas = _replicas(keys, parallel) * keys.tree["parallel"][LAYOUT["context"]]
    strategy = "optim" if replicas > 1 else "no_shard"
    enabled = [key for key in ("fsdp.enable_fsdp", "deepspeed.enable_deepspeed") if keys[key]]
    if enabled and trainer == "grpo":
        keys.problems += [
            f"{key} is True, which MEGATRON_GRPO does not support; set {key} to False (the megatron section shards "
            "the model, and the optimizer state is sharded over the replicas)"
            for key in enabled
        ]
    elif len(enabled) == 2:
        keys.problems.append(
            f"{' and '.join(enabled)} are True, but only one of them can shard the model; set all but one to False"
        )
    elif keys["fsdp.enable_fsdp"]:
        name = str(keys["fsdp.sharding_strategy"]).upper()
        if name not in STRATEGIES:
            keys.problems.append(f"fsdp.sharding_strategy is {name}; use one of {', '.join(STRATEGIES)}")
        strategy = STRATEGIES.get(name, strategy) if replicas > 1 else "no_shard"
        if name.startswith("HYBRID") and replicas > 1:
            keys.notes.append(
                f"fsdp.sharding_strategy {name} shards over all replicas in Megalith; for one copy per machine set "
                "parallel.num_distributed_optimizer_instances in a run file"
            )
        if keys["fsdp.cpu_offload"]:
            keys.set("optim.optimizer_cpu_offload", True)
            keys.notes.append(
                "fsdp.cpu_offload: the optimizer state is in host memory; parameters stay on the GPU"
            )
    elif keys["deepspeed.enable_deepspeed"]:
        zero_strategy = _deepspeed_strategy(keys)
        strategy = zero_strategy if replicas > 1 else "no_shard"
    keys.set("parallel.data_parallel_sharding_strategy", strategy)


def _deepspeed_strategy(keys: OumiKeys) -> str:
    """Return the sharding strategy of DeepSpeed's ZeRO stage, and set the optimizer's offload."""
    name, offload_device = (
        str(keys[f"deepspeed.{key}"]).upper() for key in ("zero_stage", "offload_optimizer.device")
    )
    if name not in STAGES:
        keys.problems.append(f"deepspeed.zero_stage is {name}; use one of {', '.join(STAGES)}")
    if offload_device not in ("NONE", "CPU"):
        keys.problems.append(f"deepspeed.offload_optimizer.device is {offload_device}; use CPU or NONE")
    if offload_device == "CPU":
        keys.set("optim.optimizer_cpu_offload", True)
    keys.notes.append(f"deepspeed: {name} corresponds to data_parallel_sharding_strategy {STAGES.get(name)}")
    return STAGES.get(name, "optim")


def set_recompute(keys: OumiKeys) -> None:
    """Set activation recomputation: granularity, method, number of layers, modules."""

    def transformer_value(name: str) -> Any:
        return keys.value_of(
            f"megatron.transformer_config.{name}", f"{TRANSFORMER_OVERRIDE}{name}", default=None
        )

    granularity = transformer_value("recompute_granularity")
    in_verl = keys[f"{VERL_PREFIX}actor_rollout_ref.model.enable_gradient_checkpointing"]
    checkpointing = keys["training.enable_gradient_checkpointing"] or in_verl
    if granularity is None and checkpointing:
        granularity = "full"
    if granularity not in (None, "full", "selective"):
        keys.problems.append(
            f"megatron.transformer_config.recompute_granularity is {granularity!r}; use full, selective or null"
        )
    if granularity is not None:
        keys.set("parallel.recompute_granularity", granularity)
    read = {"full": ("recompute_method", "recompute_num_layers"), "selective": ("recompute_modules",)}
    for name in ("recompute_method", "recompute_num_layers", "recompute_modules"):
        value = transformer_value(name)
        if value is not None and name in read.get(granularity, ()):
            keys.set(f"parallel.{name}", value)
        elif value is not None:
            condition = (
                f"with {granularity} recomputation" if granularity else "without recompute_granularity"
            )
            keys.notes.append(f"megatron.transformer_config.{name} {value} has no effect {condition}")
    if granularity == "full" and "recompute_method" not in keys.tree["parallel"]:
        keys.set("parallel.recompute_method", "uniform")


def set_offload(keys: OumiKeys) -> None:
    """Set the optimizer's CPU offload."""
    section = "megatron.optimizer_config."
    fraction, offloads = keys[f"{section}optimizer_offload_fraction"], keys[f"{section}optimizer_cpu_offload"]
    verl = [f"{ACTOR}{part}optimizer_offload" for part in ("", "fsdp_config.", "megatron.")]
    offloads = offloads or keys.value_of(*verl, default=False)
    has_fraction = f"{section}optimizer_offload_fraction" in keys
    if has_fraction and (not 0 <= fraction <= 1 or (fraction > 0) != bool(offloads)):
        keys.problems.append(
            f"{section}optimizer_cpu_offload is {offloads} and optimizer_offload_fraction {fraction:g}; set True and "
            "a fraction above 0 and at most 1 to offload, or False and 0 not to"
        )
    elif offloads:
        keys.set("optim.optimizer_cpu_offload", True)
        keys.set("optim.optimizer_offload_fraction", fraction if has_fraction else 1.0)
        name = "overlap_cpu_optimizer_d2h_h2d"
        keys.set(f"optim.{name}", keys.value_of(f"{section}{name}", default=True))
