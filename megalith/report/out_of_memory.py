"""What a rank says when its device's memory is full: who asked for how much, what holds it, and what would help.

What the state of this rank's model takes right now: counted from its tensors, for the report of a full memory.
"""

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
MIN_SAVING = 0.03  # of the expected memory: what a remedy has to save to be named
BESIDE = 4e9  # bytes that CUDA's context, NCCL and cuBLAS may take beside torch's allocator


def out_of_memory(
    error: torch.OutOfMemoryError,
    config: RunConfig,
    world_size: int,
    rank: int,
    device: torch.device,
    chunks: Sequence[nn.Module] = (),
    optimizer: Optimizer | None = None,
) -> TrainingError:
    """The error to raise in place of torch's, while that one's traceback still holds the step's tensors.

    `chunks` and `optimizer` are the rank's own, as far as they had been made.
    """
    layout = build_layout(config, world_size)
    place, stage = layout.coordinates[rank], layout.stage_of(rank)
    where = (
        f"{device} of rank {rank} (pp {place.pp}, dp {place.dp}, cp {place.cp}, tp {place.tp}; stage {stage.number} of "
        f"{len(layout.stages)}, layers {layers_text(stage)})"
    )
    held = memory_by_use(device, chunks, optimizer)
    name, unit = memory_unit([size for _, size in held] or [0])
    holders = ", ".join(f"{what} {format_amount(size, unit)} {name}" for what, size in held)
    remedies = ", ".join(
        f"{what} (−{format_amount(saved, GB)} GB)" for what, saved in find_remedies(layout, stage.number)
    )
    return TrainingError(
        f"out of memory on {where}: {describe_request(error)}. "
        + describe_other_processes(device)
        + (f"It holds {holders}. " if holders else "Its model had not been made yet. ")
        + (
            f"What would help, best first, with the memory that it is expected to save: {remedies}"
            if remedies
            else "Lower data.seq_length, or run on more devices"
        )
    )


def describe_request(error: torch.OutOfMemoryError) -> str:
    """In torch's figures: `2.50 GiB were asked for, 1.20 GiB of 79.10 GiB were free`."""
    text = " ".join(str(error).split())
    asked = re.search(r"Tried to allocate ([\d.]+ [KMGT]?i?B)", text)
    free = re.search(r"total capacity of ([\d.]+ [KMGT]?i?B) of which ([\d.]+ [KMGT]?i?B) is free", text)
    if asked is None:
        return text.split(". ")[0]
    return f"{asked[1]} were asked for" + (f", {free[2]} of {free[1]} were free" if free else "")


def describe_other_processes(device: torch.device) -> str:
    """A sentence where other processes hold much of the GPU; else empty."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    if others < BESIDE:
        return ""
    return (
        f"Other processes hold about {others / GB:.0f} GB of this GPU: end them (nvidia-smi lists them), or give each "
        "rank a GPU of its own. "
    )


def memory_by_use(
    device: torch.device, chunks: Sequence[nn.Module], optimizer: Optimizer | None
) -> list[tuple[str, int]]:
    """(name, bytes), counted from the tensors; on a GPU what is left of the peak are the activations."""
    if not chunks:
        return []
    state = model_bytes(chunks)
    moments = _optimizer_tensors(optimizer, device)
    found = [
        ("weights", state.weights),
        ("gathered weights", state.gathered),
        ("gradients", state.gradients),
        ("optimizer", total_bytes(moments)),
    ]
    if device.type == "cuda":
        rest = torch.cuda.max_memory_allocated(device) - sum(size for _, size in found)
        found.append(("activations and temporary tensors", max(rest, 0)))
    return [(name, size) for name, size in found if size]


def find_remedies(layout: Layout, stage: int) -> list[tuple[str, int]]:
    """(settings, bytes that they save on the fullest device), best first: what costs no time, then what saves most.

    Only layouts that the trainer takes are named, on as many devices. `stage` is the one that ran out of memory.
    """
    config, now = layout.config, layout.stages[stage].memory.total
    found = []
    for settings, is_free in _changes(config):
        other = alternative(layout, settings)
        if other is None:
            continue
        saved = now - max(each.memory.total for each in other.stages)
        if saved >= MIN_SAVING * now:
            words = " with ".join(f"{path} {_word(value)}" for path, value in settings.items())
            found.append((not is_free, -saved, words))
    return [(words, -saved) for _, saved, words in sorted(found)][:MAX_REMEDIES]


def _changes(config: RunConfig) -> Iterable[tuple[dict[str, Any], bool]]:
    """Settings to try, and whether they cost no time."""
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


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _optimizer_tensors(optimizer: Optimizer | None, device: torch.device) -> list[torch.Tensor]:
    if optimizer is None:
        return []
    kept = [value for state in optimizer.state.values() for value in state.values()]
    values = [
        tensor for value in kept for tensor in (value.tensors if isinstance(value, Moment) else [value])
    ]
    return [value for value in values if isinstance(value, torch.Tensor) and value.device.type == device.type]
