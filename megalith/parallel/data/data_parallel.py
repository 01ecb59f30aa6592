"""Data parallelism: replicas, or FSDP2 (`fully_shard`), by Megatron's names and with Megatron's reductions.

Every rank of data × context runs the model on its own tokens, and gradients are reduced over them. Strategies differ in
what is sharded between the steps (ZeRO, Rajbhandari et al. 2020):

    strategy              optimizer state   gradients        parameters         sent for each micro-batch
    no_shard              replicated        replicated       replicated         nothing; the last: all-reduce
    optim (ZeRO-1)        sharded           whole            whole in a step    nothing; once a step gather and reduce
    optim_grads (ZeRO-2)  sharded           sharded          whole in a step    reduce-scatter
    optim_grads_params    sharded           sharded          a layer at a time  two all-gathers, reduce-scatter
      (ZeRO-3)

Under optim_grads_params the last `fsdp_unsharded_layers` of a stage are as under optim_grads: their parameters stay
gathered from the step's first forward to its last backward, as long as memory allows. On Llama-3-8B, two GPUs, two
micro-batches, all of them: 1,721 → 1,634 ms a step for 13.5 GB (benchmarks/RESULTS.md).

The bucket is a layer; embedding, final norm and a tied head are one together, so that a tied weight has one gradient. A
head of its own is another. Both stay gathered for the step. With no_shard parameters are those of one process, and
replicas.py all-reduces their gradients during the backward pass. The other strategies are FSDP2's: it prefetches the
next layer while one computes, and reduces gradients during the backward pass; with hybrid sharding the reduced shards
are then all-reduced over the replicas.

Gradients are summed, never averaged: the loss is divided by the global count of valid tokens. FSDP2 gathers a layer in
the compute dtype, and accumulates and reduces its gradients in fp32; SumInFp32 sends them as they are. Embedding and
head are gathered in fp32, as one process has them (frozen ones as they are stored): a common token's row is the sum of
thousands of gradients. So a bf16 run, too, is one process's run, up to the order of additions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from megalith.comm.collectives import local
from megalith.config import ParallelConfig
from megalith.models.transformer import Transformer, layers_of
from megalith.models.vocabulary import OutputMatrix
from megalith.ops import kernels
from megalith.parallel.data.replicas import replicate
from megalith.parallel.mesh import Mesh


@dataclass(frozen=True)
class Strategy:
    """When FSDP2 frees parameters, and when it reduces gradients."""

    reshards_after_forward: bool
    """A layer's parameters are freed after its forward and gathered again for its backward."""

    reduces_each_micro_batch: bool
    """Gradients are reduced after each micro-batch, not only after the last."""


STRATEGIES = {
    "optim": Strategy(reshards_after_forward=False, reduces_each_micro_batch=False),
    "optim_grads": Strategy(reshards_after_forward=False, reduces_each_micro_batch=True),
    "optim_grads_params": Strategy(reshards_after_forward=True, reduces_each_micro_batch=True),
}


def apply_data(chunks: Iterable[Transformer], mesh: Mesh, parallel: ParallelConfig) -> None:
    """Shards the parameters of this rank's model chunks over mesh.fsdp, in place, and experts over mesh.expert_fsdp;
    nothing over an axis of size 1. With no_shard they stay as they are, replicas.

    It comes after everything that changes layers or their parameters (stages, tensor parallelism), while these may
    still be on the meta device. Dimension 0 is what is sharded: the model keeps it long in every weight.
    """
    if _are_whole(parallel):
        for chunk in chunks:
            replicate(chunk, mesh, parallel.dp_comm_overlap_bucket_size)
        return
    strategy = STRATEGIES[parallel.data_parallel_sharding_strategy]
    frees = (
        None if strategy.reshards_after_forward else False
    )  # None: all but the root, whose backward comes next
    for chunk in chunks:
        dtype, ignored = chunk.compute_dtype, set()
        for experts in _experts(chunk):
            if mesh.expert_fsdp is not None:
                how = dict(reshard_after_forward=frees, shard_placement_fn=_placement(mesh))
                _shard(experts, mesh.expert_fsdp, dtype, parallel, **how)
            else:
                ignored |= set(experts.parameters())
        if mesh.dp_cp.size > 1:
            how = dict(ignored_params=ignored, reshard_after_forward=frees)
            for layer in layers_of(chunk).values():
                _shard(layer, mesh.fsdp, dtype, parallel, **how)
            if _has_head(chunk):
                stays = dict(how, reshard_after_forward=False)
                _shard(chunk.output_layer, mesh.fsdp, torch.float32, parallel, **stays)
            _shard(chunk, mesh.fsdp, torch.float32, parallel, **how)
        for module in _unsharded(chunk, parallel):
            module.set_reshard_after_forward(False, recurse=False)


def prepare_backward(chunks: Iterable[nn.Module], parallel: ParallelConfig, is_last: bool) -> None:
    """To be called before a micro-batch's backward: `is_last` when no other of the step follows on these chunks.

    The last one reduces the gradients, over the copies too, and frees the gathered parameters, so that the next step
    gathers what the optimizer has made of them.
    """
    if _are_whole(parallel):
        for chunk in chunks:
            chunk.replicated.prepare_backward(is_last)
        return
    strategy = STRATEGIES[parallel.data_parallel_sharding_strategy]
    for root in _roots(chunks):
        root.set_requires_gradient_sync(is_last or strategy.reduces_each_micro_batch)
        root.set_requires_all_reduce(is_last)
        root.set_reshard_after_backward(is_last or strategy.reshards_after_forward)
        for module in [*_outside(root), *_unsharded(root, parallel)]:
            module.set_reshard_after_backward(is_last, recurse=False)
        if parallel.pipeline_model_parallel_size == 1:
            root.set_is_last_backward(is_last)


def finish_weight_gradients(chunks: Iterable[nn.Module], parallel: ParallelConfig, is_last: bool) -> None:
    """To be called after wgrads were added outside of the backward pass, as a zero-bubble schedule does.

    What has come in the compute dtype is added to the fp32 sums; the `is_last` call of the step reduces them.
    """
    if _are_whole(parallel):
        for chunk in chunks if is_last else ():
            chunk.replicated.begin()
        return
    roots = _roots(chunks)
    prepare_backward(roots, parallel, is_last)
    for root in roots:
        root._get_fsdp_state()._root_post_backward_final_callback()  # what a backward pass ends with


def wait_for_gradients(chunks: Iterable[nn.Module], parallel: ParallelConfig) -> None:
    """To be called when all passes of a step are through: the gradients of these chunks are sums from here on.

    FSDP2 has waited at the end of each backward pass.
    """
    for chunk in chunks if _are_whole(parallel) else ():
        chunk.replicated.wait()


def wait_for_reductions(chunks: Iterable[nn.Module]) -> None:
    """To be called when an exception has ended a step's passes, before its gradients are freed: the stream that
    computes waits for what is still summed into them. The host waits for nothing."""
    for root in _roots(chunks):
        stream = getattr(root._get_fsdp_state()._comm_ctx, "reduce_scatter_stream", None)
        if isinstance(stream, torch.cuda.Stream):
            torch.cuda.current_stream(stream.device).wait_stream(stream)


def reshard_parameters(chunks: Iterable[nn.Module]) -> None:
    """Frees what forward passes without a backward (evaluation, generation) have left gathered.

    Whoever changes weights after such a pass other than by the step's own optimizer calls this first: a parameter
    that stays gathered would be used as it was.
    """
    for chunk in chunks:
        for module in _sharded_modules(chunk):
            module.reshard()


def _are_whole(parallel: ParallelConfig) -> bool:
    return parallel.data_parallel_sharding_strategy == "no_shard"


def _has_head(chunk: nn.Module) -> bool:
    """Whether the output matrix is gathered by itself, behind the layers: it is then called once a pass."""
    head = getattr(chunk, "output_layer", None)
    return isinstance(head, OutputMatrix) and not chunk.config.further_layers


def _outside(root: FSDPModule) -> list[FSDPModule]:
    """The sharded modules of what is outside of the layers, which stay gathered from a step's first forward pass to its
    last backward pass."""
    if not hasattr(root, "layers"):  # the root of experts has none
        return []
    head = getattr(root, "output_layer", None)
    return [root, head] if isinstance(head, FSDPModule) else [root]


class ReduceScatter:
    """FSDP2's reduce-scatter, of gradients to fp32 sums, whose result may take the place of activations.

    PyTorch's allocator keeps each stream's memory apart, and FSDP2 asks for results on a stream of its own: then no
    gradient can take the place of activations, which the stream that computes has freed. So a result that becomes the
    gradient comes from that stream's memory. FSDP2's stream waits for its last use there, and the gradient may be freed
    when the stream that computes has waited for the result: at the end of a step's last backward pass, or in
    `wait_for_reductions`. What is added to a gradient is freed before: it is left to FSDP2's stream, and so is what is
    reduced over replicas.
    """

    def __init__(self, module: FSDPModule, ranks: int, replicas: bool) -> None:
        """It makes the gradients of `module`'s own parameters."""
        self._state, self._ranks, self._replicas = module._get_fsdp_state(), ranks, replicas
        self._input, self._computes = 0, None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The input in `dtype`, and at the next call the result of it, fp32."""
        length = math.prod(size)
        if length * self._ranks != self._input:  # not the result: what an exception has left may be any call
            self._input = length
            self._computes = torch.cuda.current_stream(device) if device.type == "cuda" else None
            return torch.empty(*size, dtype=dtype, device=device)
        self._input = 0
        if self._computes is None or not self._becomes_gradient():
            return torch.empty(*size, dtype=torch.float32, device=device)
        with torch.cuda.stream(self._computes):
            result = torch.empty(*size, dtype=torch.float32, device=device)
        torch.cuda.current_stream(device).wait_stream(self._computes)
        return result

    def _becomes_gradient(self) -> bool:
        shards = [parameter.sharded_param for parameter in self._state._fsdp_param_group.fsdp_params]
        return not self._replicas and all(
            shard.grad is None and shard.dtype == torch.float32 for shard in shards if shard.requires_grad
        )

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op,
        async_op: bool = False,
    ) -> None:
        # torch 2.13's name, or the older one.
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        reduce_scatter(output_tensor, input_tensor, op=op, group=group)


class Fp32SumReduceScatter(ReduceScatter):
    """Of gradients in the compute dtype: an all-to-all in it, and one sum in fp32 of what has come. The result is that
    of a reduce-scatter in fp32, which sends twice as many bytes."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op,
        async_op: bool = False,
    ) -> None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        parts = received.view(group.size(), -1)
        if kernels.AVAILABLE and parts.is_cuda:
            kernels.sum_rows(parts, output_tensor)
        else:
            torch.sum(parts, 0, dtype=torch.float32, out=output_tensor)


def _shard(module: nn.Module, over: DeviceMesh, dtype: torch.dtype, parallel: ParallelConfig, **how) -> None:
    """Lets FSDP2 gather the module in `dtype`, and reduce its gradients in fp32."""
    strategy = STRATEGIES[parallel.data_parallel_sharding_strategy]
    wanted = parallel.exchanges_gradients and strategy.reduces_each_micro_batch
    ranks = over.size(over.ndim - 1)
    exchanges = wanted and dtype != torch.float32 and ranks > 1
    # cast_forward_inputs would cast masks and rotary tables too
    reduced = dtype if exchanges else torch.float32
    gathered = None if dtype == torch.float32 else dtype  # as it is stored: frozen matrices may be in bf16
    policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduced, cast_forward_inputs=False)
    fully_shard(module, mesh=over, mp_policy=policy, **how)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    if ranks > 1:
        kind = Fp32SumReduceScatter if exchanges else ReduceScatter
        module.set_custom_reduce_scatter(kind(module, ranks, replicas=over.ndim > 1))


def _sharded_modules(chunk: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in chunk.modules() if isinstance(module, FSDPModule))


def _unsharded(chunk: nn.Module, parallel: ParallelConfig) -> list[FSDPModule]:
    """The sharded modules of the last layers that stay gathered under optim_grads_params: layers, and their experts."""
    if not parallel.unsharded_layers or not hasattr(chunk, "layers"):  # the root of experts has none
        return []
    kept = list(layers_of(chunk).values())[-parallel.unsharded_layers :]
    return [module for layer in kept for module in _sharded_modules(layer)]


def _roots(chunks: Iterable[nn.Module]) -> list[FSDPModule]:
    """The sharded modules that stand in no other: the chunks, or where data × context is 1 each layer's experts."""
    return [
        root
        for chunk in chunks
        for root in ([chunk] if isinstance(chunk, FSDPModule) else _sharded_modules(chunk))
    ]


def _experts(chunk: Transformer) -> Iterator[nn.Module]:
    layers = layers_of(chunk).values()
    return (layer.mlp.experts for layer in layers if getattr(layer, "has_experts", False))


def _placement(mesh: Mesh) -> Callable[[nn.Parameter], Shard]:
    """The dimension of an expert weight's local shard that comes out even over the ranks; the experts', at best."""
    size = mesh.expert_fsdp.size(mesh.expert_fsdp.ndim - 1)

    def place(parameter: nn.Parameter) -> Shard:
        shape = local(parameter).shape
        return Shard(next((dim for dim, length in enumerate(shape) if length % size == 0), 0))

    return place
