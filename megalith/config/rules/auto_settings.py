"""Resolve `auto` in settings that only affect speed to the fastest choice for a run.

docs/parallelism.md has the measurements. A value that the rules would reject in a run file is never chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalith.config.rules.dynamic_context_rules import context_degrees
from megalith.config.rules.fp8_rules import check_fp8
from megalith.config.rules.parallel_rules import check_overlap, check_saved_attention
from megalith.config.run import RunConfig
from megalith.errors import ConfigError


@dataclass(frozen=True)
class Machine:
    """Hardware shared by a run's ranks."""

    ranks_per_host: int = 1
    """Neighbouring ranks that share a host, the same number on every host."""
    compiled: bool = False
    """Layers are compiled for GPUs, so that computation and communication can overlap."""
    nvlink: bool = False
    """All GPUs of a host are connected by NVLink, and the package cuda-bindings is installed."""
    memory: int = 0
    """Bytes of the GPU with the least memory; 0 without GPUs."""
    ranks: int = 0
    """Number of ranks of the run; 0: unknown."""
    least_work: float = 3.5e12
    """FLOPs of a layer's forward and backward pass of a micro-batch below which the host launches halves too slowly.

    Measured with TP2 and SP: with 2.5 TFLOP a step took 213 ms whole and 325 ms in halves, on a host that needs about
    9 µs to launch a kernel; with 3.9 TFLOP (GPT-2-large) 423 ms whole and 379 ms in halves, on another host.
    """
    no_nvlink: str = "no NVLink"
    """Reason for `nvlink` being False."""
    launch: float = 0.0
    """Microseconds that the slowest rank's host takes to launch a small kernel; 0: not measured.

    No choice depends on it: it varies between starts, and a run must resume with the same choices.
    """


def resolve_auto(config: RunConfig, machine: Machine) -> tuple[RunConfig, list[str]]:
    """Resolve the `auto` settings of `parallel`, except those that depend on GPU memory (planner/layout.py).

    Returns:
        The configuration, and the choices with their reasons.

    Raises:
        ConfigError: a choice contradicts a setting of the user.
    """
    choices: list[str] = []
    if config.parallel.cp_comm_type == "auto" and config.parallel.shards_sequences:
        choose = _with_dynamic_exchange if config.parallel.dynamic_context_parallel else _with_exchange
        config, reason = choose(config, machine)
        check_saved_attention(config.model, config.parallel)
        check_overlap(config)
        choices.append(f"parallel.cp_comm_type {config.parallel.cp_comm_type} ({reason})")
    parallel, settings = config.parallel, {}
    overlaps = parallel.overlaps
    if parallel.tp_comm_overlap == "auto":
        has_collectives = parallel.tensor_model_parallel_size > 1 or _exchanges_heads(config)
        obstacle = _obstacle(config, machine) if has_collectives and machine.compiled else ""
        overlaps = has_collectives and machine.compiled and not obstacle
        settings["parallel.tp_comm_overlap"] = overlaps
        if has_collectives and machine.memory and not machine.compiled:
            obstacle = "layers are not compiled"
        if overlaps or obstacle:
            reason = obstacle or "two halves of a micro-batch"
            choices.append(f"parallel.tp_comm_overlap {str(overlaps).lower()} ({reason})")
    if parallel.symmetric_memory_groups == "auto":
        axes = _direct_axes(config, machine, overlaps) if machine.compiled else []
        groups = settings["parallel.symmetric_memory_groups"] = axes if machine.nvlink else []
        if axes:
            reason = "NVLink" if groups else machine.no_nvlink
            choices.append(f"parallel.symmetric_memory_groups [{', '.join(groups)}] ({reason})")
    if parallel.reduce_scatter_with_fp32_accumulation == "auto" and _reduces_layers(config, machine):
        one_host = machine.ranks == machine.ranks_per_host
        settings["parallel.reduce_scatter_with_fp32_accumulation"] = one_host
        reason = "one host" if one_host else "several hosts"
        choices.append(f"parallel.reduce_scatter_with_fp32_accumulation {str(one_host).lower()} ({reason})")
    if config.train.fp8_format and config.train.fp8_cache_weights == "auto" and not machine.memory:
        settings["train.fp8_cache_weights"] = parallel.has_unsharded_layers
    return config.with_unvalidated(settings) if settings else config, choices


def auto_note(choices: list[str]) -> list[str]:
    """Return the start line that lists the choices; empty if there are none."""
    return [f"chosen by auto: {'; '.join(choices)}"] if choices else []


def _reduces_layers(config: RunConfig, machine: Machine) -> bool:
    """Return True if layers' gradients are reduce-scattered in less than fp32."""
    parallel = config.parallel
    ranks = machine.ranks // (parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)
    shards = ranks // parallel.num_distributed_optimizer_instances
    sharded = parallel.data_parallel_sharding_strategy in ("optim_grads", "optim_grads_params")
    return sharded and shards > 1 and config.train.precision != "fp32"


def _with_exchange(config: RunConfig, machine: Machine) -> tuple[RunConfig, str]:
    """Choose cp_comm_type and return the reason.

    All-to-all CP within a host if the heads are divisible; otherwise, and between hosts, a ring of keys and values.
    Encoder-decoders always use all-to-all. Batch-invariant runs use all-to-all if the axis divides the heads, and
    all-gather otherwise.
    """
    parallel = config.parallel
    if config.model.encoder_layers:
        chosen = config.with_unvalidated({"parallel.cp_comm_type": "a2a"})
        return chosen, "the only one with cross-attention"
    size, tensor = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    heads = config.model.num_attention_heads // tensor
    if config.is_batch_invariant:
        chosen = "a2a" if heads % size == 0 else "all_gather"
        return config.with_unvalidated({"parallel.cp_comm_type": chosen}), "a ring is not batch invariant"
    in_host = [d for d in range(1, size + 1) if size % d == 0 and machine.ranks_per_host % (d * tensor) == 0]
    a2a_size = max((d for d in in_host if heads % d == 0), default=1)
    reason = f"the {heads} heads of a tensor-parallel rank over ranks of one host"
    if a2a_size == size:
        return config.with_unvalidated({"parallel.cp_comm_type": "a2a"}), reason
    if a2a_size == 1:
        sizes = " or ".join(str(d) for d in in_host if d > 1)
        reason = f"the heads of a tensor-parallel rank, {heads}, do not divide over {sizes} ranks of one host"
        if not sizes:
            reason = f"CP {size} × TP {tensor} does not divide over hosts of {machine.ranks_per_host} ranks"
        if machine.ranks_per_host <= tensor:
            reason = "no two of its ranks share a host"
        return config.with_unvalidated({"parallel.cp_comm_type": "p2p"}), reason
    levels = [a2a_size, size // a2a_size]
    two_levels = {"parallel.cp_comm_type": "a2a+p2p", "parallel.hierarchical_context_parallel_sizes": levels}
    return config.with_unvalidated(
        two_levels
    ), f"{reason}, in {size // a2a_size} groups of {a2a_size} ranks with a ring between the groups"


def _with_dynamic_exchange(config: RunConfig, machine: Machine) -> tuple[RunConfig, str]:
    """Choose cp_comm_type for dynamic context parallelism, and return the new configuration and the reason.

    `a2a` if the largest group fits on one host and its size divides the heads of a tensor-parallel rank, otherwise
    `p2p`.
    """
    tensor = config.parallel.tensor_model_parallel_size
    size = context_degrees(max(machine.ranks // tensor, 1))[-1]
    heads = config.model.num_attention_heads // tensor
    in_host = machine.ranks_per_host % (size * tensor) == 0
    chosen = "a2a" if in_host and heads % size == 0 else "p2p"
    reason = f"the {heads} heads of a tensor-parallel rank over up to {size} ranks of one host"
    if chosen == "p2p":
        reason = f"groups have up to {size} ranks" + (
            f", which do not divide the {heads} heads of a tensor-parallel rank"
            if in_host
            else ", of several hosts"
        )
    return config.with_unvalidated({"parallel.cp_comm_type": chosen}), reason


def _exchanges_heads(config: RunConfig) -> bool:
    parallel = config.parallel
    if parallel.dynamic_context_parallel:  # neither in halves of a micro-batch nor by copy engines
        return False
    return parallel.context_parallel_size > 1 and "a2a" in parallel.resolved_cp_comm_type


def _obstacle(config: RunConfig, machine: Machine) -> str:
    """Return the reason against ping-pong micro-batches, or "" if there is none."""
    if config.train.micro_batch_size % 2:
        return f"train.micro_batch_size {config.train.micro_batch_size} is odd"
    if config.model.num_experts is not None:
        return "not with experts"
    if config.parallel.dynamic_context_parallel:
        return "not with dynamic_context_parallel, because its passes have one row"
    if config.parallel.pipeline_schedule == "zero_bubble":
        return "not with zero_bubble"
    if (work := _layer_work(config)) < machine.least_work:
        return (
            f"the GPU finishes a layer's {work / 1000000000000.0:.2g} TFLOP before the host "
            "has launched the kernels of two halves"
        )
    try:
        if config.train.fp8_format is not None:
            check_fp8(config.with_unvalidated({"parallel.tp_comm_overlap": True}))
    except ConfigError:
        return (
            f"FP8 does not support half of {config.train.micro_batch_size} × {config.data.seq_length} tokens"
        )
    return ""


def _layer_work(config: RunConfig) -> float:
    """Return the FLOPs of a layer's matmuls for a micro-batch on a rank, both passes; FP8 counts half."""
    model, parallel, train = config.model, config.parallel, config.train
    attention = 2 * (model.num_attention_heads + model.query_groups) * model.head_dim
    weights = model.hidden_size * (attention + (3 if model.gated else 2) * model.ffn_size)
    tokens = train.micro_batch_size * config.data.seq_length
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    return 6 * weights * tokens / ranks / (1 if train.fp8_format is None else 2)


def _direct_axes(config: RunConfig, machine: Machine, overlaps: bool) -> list[str]:
    """Return the axes within a host for whose collectives copy engines are faster than NCCL.

    `overlaps`: tp_comm_overlap as chosen.
    """
    parallel, axes = config.parallel, []
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if tensor > 1 and overlaps and machine.ranks_per_host % tensor == 0:
        axes.append("tp")
    inner = (parallel.hierarchical_context_parallel_sizes or [context])[0]
    if _exchanges_heads(config) and machine.ranks_per_host % (inner * tensor) == 0:
        axes.append("cp")
    return axes
