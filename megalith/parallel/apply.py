"""The one ordered list: how a plain model becomes this rank's part of the one that trains."""

from __future__ import annotations

import torch

from megalith.config import RunConfig
from megalith.models.init import initialize
from megalith.models.transformer import Transformer, layers_of
from megalith.ops.compiled import in_pieces
from megalith.ops.fp8.recipes import AmaxTable
from megalith.parallel.context.context_parallel import apply_context
from megalith.parallel.data.data_parallel import apply_data
from megalith.parallel.expert.expert_parallel import apply_expert
from megalith.parallel.fp8_linears import apply_fp8
from megalith.parallel.memory.activation_offload import apply_activation_offload
from megalith.parallel.memory.recompute import apply_recompute
from megalith.parallel.mesh import Mesh
from megalith.parallel.overlap.ping_pong import apply_ping_pong, interleaving
from megalith.parallel.pipeline.stages import assign_layers, schedule_kind, split_stages
from megalith.parallel.seams import plug
from megalith.parallel.shards import to_local_parameters
from megalith.parallel.tensor.lora_shards import shard_adapters
from megalith.parallel.tensor.tensor_parallel import apply_tensor


def apply(
    model: Transformer, config: RunConfig, mesh: Mesh, device: torch.device, table: AmaxTable | None = None
) -> list[Transformer]:
    """This rank's chunks of `model`, which is on the meta device, with their initial weights on `device`.

    1. Pipeline: what other stages hold goes first, so that nothing after it works on what is not here.
    2. Tensor: parameters become shards, and a layer then has the heads of this rank; adapters follow their linears.
    3. Context: replaces the core of attention, which those heads go through.
    4. Experts: their own mesh over the same ranks. What they dispatch is what sequence parallelism has left here.
    5. FP8: linears and experts, as they stand now, get other matmuls; `table` has the scales of delayed ones.
    6. Ping-pong micro-batches: layers run two halves of a micro-batch, each with all the collectives of the axes;
       only attention does, where context parallelism has put in all there are.
    7. Recompute: wraps the code as the axes have left it, their collectives included; a unit of layers has both halves.
    8. Compile: after everything that changes a layer's code. Zero-bubble takes backward passes apart: not compiled.
    9. Offload: outside of compiled layers, and of recomputed ones, whose inputs it can then take away.
    10. Data: shards the parameters as tensor parallelism has left them; a layer is its unit.
    11. Storage is made, and filled: weights depend on their names and places alone, not on the steps before.
    12. Layers have plain parameters on that storage, but for FSDP2's modules.
    """
    parallel = config.parallel
    chunks = split_stages(model, assign_layers(config.model, parallel), mesh.pp.rank)
    if device.type == "cuda" and compiles(config, device):
        from megalith.parallel.overlap.inductor import set_activation_budget  # imports the compiler: seconds

        set_activation_budget(config.runtime.activation_share)
    for chunk in chunks:
        tensor = apply_tensor(chunk, mesh.tp, parallel.sequence_parallel, parallel.save_gathered_inputs)
        if tensor is not None:
            shard_adapters(chunk, tensor)
        apply_context(chunk, mesh.cp, parallel.cp_exchange, parallel.hierarchical_context_parallel_sizes)
        apply_expert(
            chunk, mesh, tensor, parallel.moe_token_dispatcher_type, parallel.moe_static_dispatch is True
        )
        apply_fp8(chunk, config, mesh, device, table)
        apply_ping_pong(chunk, parallel, tensor)
        apply_recompute(chunk, parallel, mesh.tp, compiles(config, device))
        if compiles(config, device):
            options = {"options": interleaving()} if parallel.overlaps else {}
            for layer in layers_of(chunk).values():
                if layer.has_experts:  # whose dispatch is no part of a graph
                    plug(layer, "runner", in_pieces)
                else:
                    layer.compile(fullgraph=True, **options)
                if layer.has_experts and layer.mlp.shared_experts is not None:
                    layer.mlp.shared_experts.compile(fullgraph=True)
        apply_activation_offload(chunk, parallel)
    apply_data(chunks, mesh, parallel)
    for chunk in chunks:
        chunk.to_empty(device=device)
        if device.type != "meta":  # which has shapes alone: a dry run
            initialize(chunk, config.model, config.train.seed, show_progress=mesh.world.rank == 0)
        to_local_parameters(chunk)
    return chunks


def compiles(config: RunConfig, device: torch.device) -> bool:
    """Whether layers are compiled: as asked, or by default on GPUs where the schedule allows it."""
    if config.runtime.compile == "auto":
        return device.type == "cuda" and schedule_kind(config.parallel) != "zero_bubble"
    return config.runtime.compile
