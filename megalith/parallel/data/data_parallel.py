"""Data parallelism by FSDP2 (`fully_shard`) or replicas, under the names of Megatron's sharding strategies.

    strategy (ZeRO stage)     optimizer state  gradients   parameters            communication per micro-batch
    no_shard                  replicated       replicated  replicated            all-reduce after the last
    optim (1)                 sharded          full        full during a step    once per step: gather, reduce-scatter
    optim_grads (2)           sharded          sharded     full during a step    reduce-scatter
    optim_grads_params (3)    sharded          sharded     one layer at a time   two all-gathers, reduce-scatter

Each layer is one FSDP2 unit. Embedding, final norm and a tied head form another unit, and an untied head is a unit of
its own; these units stay unsharded for the step. Under optim_grads_params the last `fsdp_unsharded_layers` of a stage
stay unsharded too: with all layers of Llama-3-8B on two GPUs and two micro-batches, a step takes 1,634 ms instead of
1,721, for 13.5 GB.

Gradients are summed, not averaged, because the loss is divided by the global number of valid tokens. FSDP2 gathers
layers in the compute dtype and accumulates gradients in fp32. Embedding and head are gathered in fp32, because the row
of a frequent token sums thousands of gradients. A bf16 run therefore differs from a run in one process only by the
order of additions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from megalith.compat.fsdp import end_backward, reduce_scatter_stream
from megalith.config import ParallelConfig
from megalith.local_shards import local
from megalith.models.transformer import Transformer, layers_of
from megalith.models.vocabulary import OutputMatrix
from megalith.parallel.data.fsdp_reduce_scatter import (
    Fp32SumReduceScatter,
    OrderedReduceScatter,
    ReduceScatter,
)
from megalith.parallel.data.replicas import replicate
from megalith.parallel.mesh import Mesh


@dataclass(frozen=True)
class Strategy:
    """Timing of FSDP2's resharding and gradient reduction."""

    reshards_after_forward: bool
    """True if parameters are resharded after a layer's forward pass, and gathered again for its backward pass."""

    reduces_each_micro_batch: bool
    """True if gradients are reduced after every micro-batch, not only after the last."""


STRATEGIES = {
    "optim": Strategy(reshards_after_forward=False, reduces_each_micro_batch=False),
    "optim_grads": Strategy(reshards_after_forward=False, reduces_each_micro_batch=True),
    "optim_grads_params": Strategy(reshards_after_forward=True, reduces_each_micro_batch=True),
}


def apply_data(
    chunks: Iterable[Transformer], mesh: Mesh, parallel: ParallelConfig, in_order: bool = False
) -> None:
    """Shard the parameters of this rank's chunks over mesh.fsdp, and of experts over mesh.expert_fsdp, in place.

    Under no_shard, parameters stay replicated and their gradients get all-reduced. Call it after everything that
    changes layers or parameters (stages, tensor parallelism); parameters may be on the meta device. FSDP2 shards
    dimension 0. With `in_order`, its reduce-scatters add in the order of ordered_sums.py.
    """
    if _is_replicated(parallel):
        for chunk in chunks:
            replicate(chunk, mesh, parallel.dp_comm_overlap_bucket_size)
        return
    strategy = STRATEGIES[parallel.data_parallel_sharding_strategy]
    # None: reshard all but the root, whose backward pass comes next.
    reshard = None if strategy.reshards_after_forward else False
    for chunk in chunks:
        dtype, ignored = chunk.compute_dtype, set()
        for experts in _experts(chunk):
            if mesh.expert_fsdp is not None:
                options = dict(reshard_after_forward=reshard, shard_placement_fn=_expert_placement(mesh))
                _fully_shard(experts, mesh.expert_fsdp, dtype, parallel, in_order, **options)
            else:
                ignored |= set(experts.parameters())
        if mesh.dp_cp.size > 1:
            options = dict(ignored_params=ignored, reshard_after_forward=reshard)
            for layer in layers_of(chunk).values():
                _fully_shard(layer, mesh.fsdp, dtype, parallel, in_order, **options)
            if _has_untied_head(chunk):
                unsharded = dict(options, reshard_after_forward=False)
                _fully_shard(chunk.output_layer, mesh.fsdp, torch.float32, parallel, in_order, **unsharded)
                # Without prefetching, its gather would begin only when the last layer has ended.
                if layers := list(layers_of(chunk).values()):
                    layers[-1].set_modules_to_forward_prefetch([chunk.output_layer])
            _fully_shard(chunk, mesh.fsdp, torch.float32, parallel, in_order, **options)
        for module in _unsharded_layers(chunk, parallel):
            module.set_reshard_after_forward(False, recurse=False)


def prepare_backward(
    chunks: Iterable[nn.Module], parallel: ParallelConfig, is_last: bool, in_order: bool = False
) -> None:
    """Select whether the next backward pass reduces gradients. Call it before each micro-batch's backward pass.

    With `is_last`, the next pass is the step's last one on these chunks. It reduces the gradients, also over replicas,
    and reshards the parameters, so that the next step gathers the updated ones. With `in_order`, FSDP2 reduces the
    gradients of every pass and waits for them, and replicas reduce theirs after all passes of the step.
    """
    if _is_replicated(parallel):
        for chunk in chunks:
            chunk.replication.reducer.prepare_backward(is_last, in_order)
        return
    strategy = STRATEGIES[parallel.data_parallel_sharding_strategy]
    for root in _roots(chunks):
        root.set_requires_gradient_sync(is_last or strategy.reduces_each_micro_batch or in_order)
        root.set_requires_all_reduce(is_last)
        root.set_reshard_after_backward(is_last or strategy.reshards_after_forward)
        for module in [*_outside_layers(root), *_unsharded_layers(root, parallel)]:
            module.set_reshard_after_backward(is_last, recurse=False)
        if parallel.pipeline_model_parallel_size == 1:
            root.set_is_last_backward(is_last or in_order)  # which waits for the reductions


def finish_weight_gradients(
    chunks: Iterable[nn.Module], parallel: ParallelConfig, is_last: bool, in_order: bool = False
) -> None:
    """Accumulate weight gradients that a zero-bubble schedule computed outside a backward pass. With `is_last`, reduce
    them over ranks.

    Gradients in the compute dtype are added to the fp32 sums, and the call with `is_last` reduces the sums. With
    `in_order`, FSDP2 reduces the gradients of every pass, and replicas reduce theirs after all passes of the step.
    """
    if _is_replicated(parallel):
        for chunk in chunks if is_last and not in_order else ():
            chunk.replication.reducer.start_all_reduces()
        return
    roots = _roots(chunks)
    prepare_backward(roots, parallel, is_last, in_order)
    for root in roots:
        end_backward(root)


def wait_for_gradients(chunks: Iterable[nn.Module], parallel: ParallelConfig) -> None:
    """Wait for a step's gradient reductions, after its last backward pass.

    FSDP2 already waits at the end of each backward pass.
    """
    for chunk in chunks if _is_replicated(parallel) else ():
        chunk.replication.reducer.wait()


def wait_for_reductions(chunks: Iterable[nn.Module]) -> None:
    """Make the compute stream wait for pending reductions, so that gradients can be freed after an exception.

    The host does not wait.
    """
    for root in _roots(chunks):
        if (stream := reduce_scatter_stream(root)) is not None:
            torch.cuda.current_stream(stream.device).wait_stream(stream)


def reshard_parameters(chunks: Iterable[nn.Module]) -> None:
    """Reshard parameters that forward passes without a backward pass (evaluation, generation) left unsharded.

    Call it before changing weights by anything but the optimizer step. Otherwise the next pass would use the old
    unsharded parameters.
    """
    for chunk in chunks:
        for module in _sharded_modules(chunk):
            module.reshard()


def _is_replicated(parallel: ParallelConfig) -> bool:
    return parallel.data_parallel_sharding_strategy == "no_shard"


def _has_untied_head(chunk: nn.Module) -> bool:
    """Return True if the output matrix is a separate FSDP2 unit.

    With MTP it is not, because a pass with MTP uses the output matrix several times.
    """
    head = getattr(chunk, "output_layer", None)
    return isinstance(head, OutputMatrix) and not chunk.config.mtp_layers


def _outside_layers(root: FSDPModule) -> list[FSDPModule]:
    """Return the FSDP2 modules that are not layers. They stay unsharded for the whole step."""
    if not hasattr(root, "layers"):  # the root of experts has none
        return []
    head = getattr(root, "output_layer", None)
    return [root, head] if isinstance(head, FSDPModule) else [root]


def _fully_shard(
    module: nn.Module,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    parallel: ParallelConfig,
    in_order: bool = False,
    **options,
) -> None:
    """Apply `fully_shard`, with parameters gathered in `dtype` and gradients reduced in fp32."""
    strategy = STRATEGIES[parallel.data_parallel_sharding_strategy]
    ranks = mesh.size(mesh.ndim - 1)
    exchanges = (
        parallel.uses_fp32_reduce_scatter
        and strategy.reduces_each_micro_batch
        and dtype != torch.float32
        and ranks > 1
        and not in_order
    )
    reduce_dtype = dtype if exchanges else torch.float32
    param_dtype = None if dtype == torch.float32 else dtype  # None: as stored; frozen matrices may be in bf16
    # cast_forward_inputs would cast masks and rotary tables too
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    fully_shard(module, mesh=mesh, mp_policy=policy, **options)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    if ranks > 1:
        kind = OrderedReduceScatter if in_order else Fp32SumReduceScatter if exchanges else ReduceScatter
        module.set_custom_reduce_scatter(kind(module, ranks, replicas=mesh.ndim > 1))


def _sharded_modules(chunk: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in chunk.modules() if isinstance(module, FSDPModule))


def _unsharded_layers(chunk: nn.Module, parallel: ParallelConfig) -> list[FSDPModule]:
    """Return the FSDP2 modules, layers and their experts, that stay unsharded under optim_grads_params."""
    if not parallel.unsharded_layers or not hasattr(chunk, "layers"):  # the root of experts has none
        return []
    kept = list(layers_of(chunk).values())[-parallel.unsharded_layers :]
    return [module for layer in kept for module in _sharded_modules(layer)]


def _roots(chunks: Iterable[nn.Module]) -> list[FSDPModule]:
    """Return the root FSDP2 modules: the chunks, or each layer's experts if data × context is 1."""
    return [
        root
        for chunk in chunks
        for root in ([chunk] if isinstance(chunk, FSDPModule) else _sharded_modules(chunk))
    ]


def _experts(chunk: Transformer) -> Iterator[nn.Module]:
    layers = layers_of(chunk).values()
    return (layer.mlp.experts for layer in layers if getattr(layer, "has_experts", False))


def _expert_placement(mesh: Mesh) -> Callable[[nn.Parameter], Shard]:
    """Return a function that selects the dimension along which an expert weight is sharded: the first that the number
    of ranks divides.
    """
    size = mesh.expert_fsdp.size(mesh.expert_fsdp.ndim - 1)

    def place(parameter: nn.Parameter) -> Shard:
        shape = local(parameter).shape
        return Shard(next((dim for dim, length in enumerate(shape) if length % size == 0), 0))

    return place
