"""Applies parallelism to a model. This is the only file that states the order of the axes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megalith.config import RunConfig
from megalith.models.init import initialize
from megalith.models.transformer import Transformer, layers_of
from megalith.ops.compiled import run_with_breaks
from megalith.ops.fp8.recipes import AmaxTable
from megalith.parallel.batch_invariant import apply_batch_invariant
from megalith.parallel.coded_base import apply_coded_base
from megalith.parallel.context.context_parallel import apply_context, apply_dynamic_context
from megalith.parallel.context.invariant_context import invariant_core
from megalith.parallel.data.data_parallel import apply_data
from megalith.parallel.expert.expert_parallel import apply_expert
from megalith.parallel.fp8_linears import apply_fp8
from megalith.parallel.memory.activation_offload import apply_activation_offload
from megalith.parallel.memory.recompute import apply_recompute
from megalith.parallel.mesh import Mesh
from megalith.parallel.overlap.ping_pong import apply_ping_pong, interleaving
from megalith.parallel.pipeline.stages import assign_layers, schedule_kind, split_stages
from megalith.parallel.seams import plug
from megalith.parallel.shards import store_frozen_as, to_local_parameters
from megalith.parallel.tensor.apply_tensor import apply_tensor
from megalith.parallel.tensor.lora_shards import shard_adapters


def apply(
    model: Transformer,
    config: RunConfig,
    mesh: Mesh,
    device: torch.device,
    table: AmaxTable | None = None,
    stored: Mapping[str, torch.dtype] | None = None,
) -> list[Transformer]:
    """Shard `model` over the mesh and return this rank's chunks, with initial weights on `device`.

    The order, with its reasons:

    1. Pipeline: drop the layers of other stages first, so that later steps only touch modules of this rank.
    2. Tensor: shard parameters and heads; adapters follow their linears.
    3. Context: replace the core of attention, which now has this rank's heads.
    4. Experts: they have their own mesh over the same ranks, and dispatch the tokens that SP leaves on this rank.
    5. Quantized base: each frozen shard is replaced by its quantized version.
    6. FP8: give sharded linears and experts FP8 matmuls; `table` holds the amax history of delayed scaling. Or batch
       invariance, which replaces every operator of the forward pass.
    7. Ping-pong: layers run two halves of a micro-batch, so that the collectives of one half overlap the computation of
      the other. With context parallelism and no tensor parallelism this applies to attention only, because only
      attention communicates.
    8. Recompute: wraps the code with its collectives; a recomputed unit of layers contains both halves.
    9. Compile: after everything that changes a layer's code. Layers are not compiled with zero-bubble, which splits
       backward passes, or with batch invariance, because each compiled graph rounds in its own way.
    10. Offload: outside compiled and recomputed layers, so that it can offload their inputs.
    11. Data: FSDP2 shards the tensor-parallel shards; its unit is a layer.
    12. Allocate and initialize: initial weights depend only on parameter name and position, not on the layout.
    13. Outside FSDP2's modules, replace DTensors by plain parameters on the same storage.

    Args:
        model: the full model, on the meta device.
        config: the run.
        mesh: this rank's axes.
        device: device of the parameters. "meta" allocates nothing (dry run).
        table: amax history of FP8 delayed scaling. None without it.
        stored: names of the parameters that will be loaded, which are not initialized, each with a dtype that
            represents all its values. Frozen matrices for which it is the compute dtype are allocated in it.
    """
    parallel = config.parallel
    chunks = split_stages(model, assign_layers(config.model, parallel), mesh.pp.rank)
    if device.type == "cuda" and compiles(config, device):
        from megalith.compat.torch_inductor import set_activation_budget  # imports the compiler

        set_activation_budget(config.runtime.activation_share)
    for chunk in chunks:
        tensor = apply_tensor(chunk, mesh.tp, parallel.sequence_parallel, parallel.save_gathered_inputs)
        if tensor is not None:
            shard_adapters(chunk, tensor)
        if mesh.context_groups:
            apply_dynamic_context(chunk, mesh.context_groups, parallel.resolved_cp_comm_type)
        else:
            apply_context(
                chunk, mesh.cp, parallel.resolved_cp_comm_type, parallel.hierarchical_context_parallel_sizes
            )
        apply_expert(
            chunk, mesh, tensor, parallel.moe_token_dispatcher_type, parallel.moe_static_dispatch is True
        )
        apply_coded_base(chunk, config.lora)
        apply_fp8(chunk, config, mesh, device, table)
        if config.is_batch_invariant:
            core = invariant_core(mesh.cp, parallel.resolved_cp_comm_type)
            apply_batch_invariant(chunk, mesh.tp, mesh.etp, core, mesh.cp)
        apply_ping_pong(chunk, parallel, tensor)
        apply_recompute(chunk, parallel, mesh.tp, compiles(config, device))
        if compiles(config, device):
            options = {"options": interleaving()} if parallel.overlaps else {}
            for layer in layers_of(chunk).values():
                if layer.has_experts:  # the dispatch cannot be part of a graph
                    plug(layer, "runner", run_with_breaks)
                else:
                    layer.compile(fullgraph=True, **options)
                if layer.has_experts and layer.mlp.shared_experts is not None:
                    layer.mlp.shared_experts.compile(fullgraph=True)
        apply_activation_offload(chunk, parallel)
        store_frozen_as(chunk, stored or {}, chunk.compute_dtype)
    apply_data(chunks, mesh, parallel, in_order=config.train.batch_invariant)
    for chunk in chunks:
        chunk.to_empty(device=device)
        if device.type != "meta":  # a dry run has no storage
            shows = mesh.world.rank == 0
            initialize(chunk, config.model, config.train.seed, show_progress=shows, left_out=stored or ())
        to_local_parameters(chunk)
    return chunks


def compiles(config: RunConfig, device: torch.device) -> bool:
    """Return True if layers are compiled, according to `runtime.compile`.

    "auto" compiles on GPUs unless zero-bubble or batch invariance is used.
    """
    if config.runtime.compile == "auto":
        excluded = schedule_kind(config.parallel) == "zero_bubble" or config.is_batch_invariant
        return device.type == "cuda" and not excluded
    return config.runtime.compile
