"""What `auto` stands for: of the ways that change the speed and nothing else, the fastest that a run has.

Figures: docs/parallelism.md. A choice that a rule would refuse where it stands in a run file is not made.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalith.config.rules.parallel_rules import check_overlap, check_saved_attention
from megalith.config.rules.run_rules import check_fp8
from megalith.config.run import RunConfig
from megalith.errors import ConfigError


@dataclass(frozen=True)
class Machine:
    """Hardware shared by a run's ranks."""

    ranks_per_host: int = 1
    """Neighbouring ranks that share a host, the same number on every host."""
    compiled: bool = False
    """Layers are compiled for GPUs, which can then run two things at a time."""
    nvlink: bool = False
    """Every GPU reaches the memory of the others of its host over NVLink, with the package cuda-bindings."""
    memory: int = 0
    """Bytes of the GPU that has least; 0 without GPUs."""
    ranks: int = 0
    """Number of ranks of the run; 0: unknown."""
    least_work: float = 1.5e12
    """FLOPs of a layer's two passes for a micro-batch, below which a host is late with two halves of them."""
    no_nvlink: str = "no NVLink"
    """Why `nvlink` is false, where it is."""


def with_fastest(config: RunConfig, machine: Machine) -> tuple[RunConfig, list[str]]:
    """`config` without an `auto` of its section parallel, and what was chosen, each with its reason. What hangs on a
    GPU's memory is left to planner/layout.py. Raises ConfigError where a choice leaves what is set by hand without its
    ground."""
    told: list[str] = []
    if config.parallel.cp_comm_type == "auto" and config.parallel.context_parallel_size > 1:
        config, why = _with_exchange(config, machine)
        check_saved_attention(config.model, config.parallel)
        check_overlap(config)
        told.append(f"parallel.cp_comm_type {config.parallel.cp_comm_type} ({why})")
    parallel, found = config.parallel, {}
    overlaps = parallel.overlaps
    if parallel.tp_comm_overlap == "auto":
        hidden = parallel.tensor_model_parallel_size > 1 or _exchanges_heads(config)
        obstacle = _obstacle(config, machine) if hidden and machine.compiled else ""
        overlaps = hidden and machine.compiled and not obstacle
        found["parallel.tp_comm_overlap"] = overlaps
        if hidden and machine.memory and not machine.compiled:
            obstacle = "layers are not compiled"
        if overlaps or obstacle:
            why = obstacle or "two halves of a micro-batch"
            told.append(f"parallel.tp_comm_overlap {str(overlaps).lower()} ({why})")
    if parallel.symmetric_memory_groups == "auto":
        near = _direct_axes(config, machine, overlaps) if machine.compiled else []
        groups = found["parallel.symmetric_memory_groups"] = near if machine.nvlink else []
        if near:
            why = "NVLink" if groups else machine.no_nvlink
            told.append(f"parallel.symmetric_memory_groups [{', '.join(groups)}] ({why})")
    if parallel.reduce_scatter_with_fp32_accumulation == "auto" and _reduces_layers(config, machine):
        near = machine.ranks == machine.ranks_per_host
        found["parallel.reduce_scatter_with_fp32_accumulation"] = near
        why = "one host" if near else "several hosts"
        told.append(f"parallel.reduce_scatter_with_fp32_accumulation {str(near).lower()} ({why})")
    if config.train.fp8_format and config.train.fp8_cache_weights == "auto" and not machine.memory:
        found["train.fp8_cache_weights"] = parallel.keeps_layers_whole
    return config.with_known(found) if found else config, told


def line_of(told: list[str]) -> list[str]:
    """The line of a run's start that says what was chosen; none where nothing was."""
    return [f"chosen by auto: {'; '.join(told)}"] if told else []


def _reduces_layers(config: RunConfig, machine: Machine) -> bool:
    """Return True if layers' gradients are reduce-scattered in less than fp32."""
    parallel = config.parallel
    ranks = machine.ranks // (parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)
    shards = ranks // parallel.num_distributed_optimizer_instances
    sharded = parallel.data_parallel_sharding_strategy in ("optim_grads", "optim_grads_params")
    return sharded and shards > 1 and config.train.precision != "fp32"


def _with_exchange(config: RunConfig, machine: Machine) -> tuple[RunConfig, str]:
    """All-to-alls within a host, a ring between hosts and where heads do not divide; where a decoder attends to an
    encoder, all-to-alls."""
    parallel = config.parallel
    if config.model.encoder_layers:
        chosen = config.with_known({"parallel.cp_comm_type": "a2a"})
        return chosen, "the one that takes cross-attention"
    size, tensor = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    heads = config.model.num_attention_heads // tensor
    near = [d for d in range(1, size + 1) if size % d == 0 and machine.ranks_per_host % (d * tensor) == 0]
    most = max((d for d in near if heads % d == 0), default=1)
    ranks = f"the {heads} heads of a tensor-parallel rank over ranks of one host"
    if most == size:
        return config.with_known({"parallel.cp_comm_type": "a2a"}), ranks
    if most == 1:
        over = " or ".join(str(d) for d in near if d > 1)
        why = f"the heads of a tensor-parallel rank, {heads}, do not divide over {over} ranks of one host"
        if not over:
            why = f"CP {size} × TP {tensor} does not divide over hosts of {machine.ranks_per_host} ranks"
        if machine.ranks_per_host <= tensor:
            why = "no two of its ranks share a host"
        return config.with_known({"parallel.cp_comm_type": "p2p"}), why
    levels = [most, size // most]
    two = {"parallel.cp_comm_type": "a2a+p2p", "parallel.hierarchical_context_parallel_sizes": levels}
    return config.with_known(two), f"{ranks}, {most} at a time, a ring between the {size // most}"


def _exchanges_heads(config: RunConfig) -> bool:
    return config.parallel.context_parallel_size > 1 and "a2a" in config.parallel.cp_exchange


def _obstacle(config: RunConfig, machine: Machine) -> str:
    """Return the reason against ping-pong micro-batches; empty if there is none."""
    if config.train.micro_batch_size % 2:
        return f"train.micro_batch_size {config.train.micro_batch_size} has no two halves"
    if config.model.num_experts is not None:
        return "not with experts"
    if config.parallel.pipeline_schedule == "zero_bubble":
        return "not with zero_bubble"
    if (work := _layer_work(config)) < machine.least_work:
        return f"a layer's {work / 1e12:.2g} TFLOP are done before the host has launched two halves of them"
    try:
        if config.train.fp8_format is not None:
            check_fp8(config.with_known({"parallel.tp_comm_overlap": True}))
    except ConfigError:
        return f"FP8 cannot take half of {config.train.micro_batch_size} × {config.data.seq_length} tokens"
    return ""


def _layer_work(config: RunConfig) -> float:
    """FLOPs of a layer's matmuls for a micro-batch on a rank, in both passes, as if in bf16."""
    model, parallel, train = config.model, config.parallel, config.train
    attention = 2 * (model.num_attention_heads + model.query_groups) * model.head_dim
    weights = model.hidden_size * (attention + (3 if model.gated else 2) * model.ffn_size)
    tokens = train.micro_batch_size * config.data.seq_length
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    return 6 * weights * tokens / ranks / (1 if train.fp8_format is None else 2)


def _direct_axes(config: RunConfig, machine: Machine, overlaps: bool) -> list[str]:
    """Axes within a host whose collectives copy engines do better than NCCL. `overlaps`: tp_comm_overlap as chosen."""
    parallel, axes = config.parallel, []
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if tensor > 1 and overlaps and machine.ranks_per_host % tensor == 0:
        axes.append("tp")
    inner = (parallel.hierarchical_context_parallel_sizes or [context])[0]
    if _exchanges_heads(config) and machine.ranks_per_host % (inner * tensor) == 0:
        axes.append("cp")
    return axes
