"""The out-of-memory error: the requested size, the uses of the memory, and settings that would help."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from megalith.config import RunConfig
from megalith.errors import TrainingError
from megalith.optim.moments import Moment
from megalith.planner.layout import Layout, alternative, build_layout
from megalith.planner.layout_text import layers_text
from megalith.report.model_memory import model_bytes, total_bytes
from megalith.tables import format_amount, memory_unit

GB = 1e9
MAX_REMEDIES = 5
MIN_SAVING = 0.03  # fraction of the expected memory that a remedy must save
LIBRARY_BYTES = 4e9  # that CUDA's context, NCCL and cuBLAS usually take outside of PyTorch's allocator


def out_of_memory(
    error: torch.OutOfMemoryError,
    config: RunConfig,
    world_size: int,
    rank: int,
    device: torch.device,
    chunks: Sequence[nn.Module] = (),
    optimizer: Optimizer | None = None,
) -> TrainingError:
    """Return the out-of-memory error to raise instead of torch's.

    Call it while torch's error is being handled: the traceback keeps the step's tensors alive, so that they are
    counted.

    Args:
        chunks: this rank's model; empty if it was not built yet.
        optimizer: this rank's optimizer, or None if it was not built yet.
    """
    layout = build_layout(config, world_size)
    position, stage = layout.coordinates[rank], layout.stage_of(rank)
    where = (
        f"{device} of rank {rank} (pp {position.pp}, dp {position.dp}, cp {position.cp}, tp {position.tp}; stage "
        f"{stage.number} of {len(layout.stages)}, layers {layers_text(stage)})"
    )
    uses = memory_by_use(device, chunks, optimizer)
    name, unit = memory_unit([size for _, size in uses] or [0])
    used = ", ".join(f"{use} {format_amount(size, unit)} {name}" for use, size in uses)
    remedies = ", ".join(
        f"{settings} (−{format_amount(saved, GB)} GB)"
        for settings, saved in find_remedies(layout, stage.number)
    )
    return TrainingError(
        f"out of memory on {where}: {describe_request(error)}. "
        + describe_other_processes(device)
        + (f"It holds {used}. " if used else "The model had not been built yet.  ")
        + (
            f"Settings that would help, best first, with the memory that they are expected to save: {remedies}"
            if remedies
            else "Lower data.seq_length, or run on more devices"
        )
    )


def describe_request(error: torch.OutOfMemoryError) -> str:
    """Return the sizes from torch's message: `2.50 GiB were requested, 1.20 GiB of 79.10 GiB were free`."""
    text = " ".join(str(error).split())
    requested = re.search(r"Tried to allocate ([\d.]+ [KMGT]?i?B)", text)
    free = re.search(r"total capacity of ([\d.]+ [KMGT]?i?B) of which ([\d.]+ [KMGT]?i?B) is free", text)
    if requested is None:
        return text.split(". ")[0]
    return f"{requested[1]} were requested" + (f", {free[2]} of {free[1]} were free" if free else "")


def describe_other_processes(device: torch.device) -> str:
    """Return a sentence if much of the GPU's memory is outside PyTorch's allocator; else an empty string.

    NCCL keeps buffers per process group: with TP4 and PP2 in ten chunks, 7 GB of an H200 were outside.
    """
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    if others < LIBRARY_BYTES:
        return ""
    return (
        f"About {others / GB:.0f} GB of this GPU's memory are outside PyTorch's allocator: in "
        "other processes (nvidia-smi lists them; end them, or give each rank its own GPU), or in "
        "NCCL's buffers of this one. "
    )


def memory_by_use(
    device: torch.device, chunks: Sequence[nn.Module], optimizer: Optimizer | None
) -> list[tuple[str, int]]:
    """Return pairs (use, bytes), counted from the tensors. On a GPU the rest of the peak counts as activations."""
    if not chunks:
        return []
    state = model_bytes(chunks)
    moments = _optimizer_tensors(optimizer, device)
    uses = [
        ("weights", state.weights),
        ("gathered weights", state.gathered),
        ("gradients", state.gradients),
        ("optimizer", total_bytes(moments)),
    ]
    if device.type == "cuda":
        rest = torch.cuda.max_memory_allocated(device) - sum(size for _, size in uses)
        uses.append(("activations and temporary tensors", max(rest, 0)))
    return [(name, size) for name, size in uses if size]


def find_remedies(layout: Layout, stage: int) -> list[tuple[str, int]]:
    """Return pairs (settings, bytes saved on the fullest device). Settings that cost no time come first, then the
    settings that save the most.

    Considers only layouts that the trainer accepts on the same number of devices. `stage` is the pipeline stage that
    ran out of memory.
    """
    config, now = layout.config, layout.stages[stage].memory.total
    remedies = []
    for settings, is_free in _changes(config):
        other = alternative(layout, settings)
        if other is None:
            continue
        saved = now - max(each.memory.total for each in other.stages)
        if saved >= MIN_SAVING * now:
            text = " with ".join(f"{path} {_yaml(value)}" for path, value in settings.items())
            remedies.append((not is_free, -saved, text))
    return [(text, -saved) for _, saved, text in sorted(remedies)][:MAX_REMEDIES]


def _changes(config: RunConfig) -> Iterable[tuple[dict[str, Any], bool]]:
    """Yield settings to try, and True if they cost no time."""
    parallel = config.parallel
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield {"parallel.sequence_parallel": True}, True
    if parallel.sequence_parallel and parallel.save_gathered_inputs:
        yield {"parallel.save_gathered_inputs": False}, False
    strategies = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
    current = strategies.index(parallel.data_parallel_sharding_strategy)
    for strategy in strategies[current + 1 :]:
        yield {"parallel.data_parallel_sharding_strategy": strategy}, strategy == "optim"
    if config.train.micro_batch_size > 1:
        yield {"train.micro_batch_size": config.train.micro_batch_size // 2}, False
    if parallel.recompute_granularity != "full":
        yield {"parallel.recompute_granularity": "full"}, False
    selective = parallel.recompute_granularity == "selective"
    if parallel.recompute_granularity is None or (selective and "mlp" not in parallel.recompute_modules):
        modules = {"parallel.recompute_modules": ["layernorm", "mlp"]}
        yield {"parallel.recompute_granularity": "selective"} | modules, False
    if not config.optim.optimizer_cpu_offload:
        if config.optim.optimizer in ("adamw", "adam"):
            yield {"optim.exp_avg_dtype": "bf16", "optim.exp_avg_sq_dtype": "bf16"}, False
            yield {"optim.exp_avg_dtype": "fp8", "optim.exp_avg_sq_dtype": "fp8"}, False
        if not config.optim.reduces_moments:
            yield {"optim.optimizer_cpu_offload": True}, False
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        yield {f"parallel.{name}": 2 * getattr(parallel, name)}, False


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _optimizer_tensors(optimizer: Optimizer | None, device: torch.device) -> list[torch.Tensor]:
    if optimizer is None:
        return []
    stored = [value for state in optimizer.state.values() for value in state.values()]
    values = [
        tensor for value in stored for tensor in (value.tensors if isinstance(value, Moment) else [value])
    ]
    return [value for value in values if isinstance(value, torch.Tensor) and value.device.type == device.type]
