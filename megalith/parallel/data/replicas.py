"""Replicated parameters (`no_shard`) and the bucketed all-reduce of their gradients, as in PyTorch's DDP.

Every rank holds all fp32 parameters and fp32 gradients. Layers cast parameters when they use them, and autograd
accumulates gradients over micro-batches. Gradients are all-reduced in place in the last backward pass of a step: once
every parameter of a bucket has its gradient, its all-reduce starts and overlaps the backward passes of earlier layers.
Each layer is a bucket; its experts are another bucket, because they have fewer replicas. Parameters outside of the
layers are one bucket, so that a tied weight is reduced once.

All ranks must start their all-reduces in the same order. They do, because they run the same code and autograd runs the
ready node that was created last, so a layer's gradients are complete before the gradients of the layer before it. If
some parameter of a bucket gets no gradient, the bucket is started after the pass, in the model's order. Which buckets
these are depends only on the configuration.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import AllreduceCoalescedOptions, Work

from megalith.comm.collectives import Axis
from megalith.local_shards import local
from megalith.models.transformer import Transformer, layers_of
from megalith.parallel.data.ordered_sums import all_reduce_in_order
from megalith.parallel.mesh import Mesh
from megalith.parallel.replication import Replication, record_replication

EXPERTS = "mlp.experts."  # prefix of expert parameters within a layer


@dataclass(eq=False)
class GradientBucket:
    """Parameters with gradients that are all-reduced together, over the same axis."""

    axis: Axis
    names: list[str]
    parameters: list[nn.Parameter] = field(default_factory=list)
    """The bucket's trained parameters."""
    pending: int = 0
    """Number of parameters without a gradient yet in the current pass."""
    work: Work | None = None
    """The all-reduce in progress."""

    @torch.no_grad()
    def start_all_reduce(self) -> None:
        """Start the all-reduce of the existing gradients, unless it has started."""
        if self.work is not None:
            return
        if gradients := self._gradients():
            options = AllreduceCoalescedOptions()  # its default is a sum
            options.asyncOp = True
            self.work = self.axis.group.allreduce_coalesced(gradients, options)

    @torch.no_grad()
    def all_reduce_in_order(self) -> None:
        """All-reduce the existing gradients in an order that does not depend on the number of ranks."""
        if gradients := self._gradients():
            all_reduce_in_order(gradients, self.axis)

    def _gradients(self) -> list[Tensor]:
        return [local(parameter.grad) for parameter in self.parameters if parameter.grad is not None]

    def wait(self) -> None:
        """Wait for the all-reduce. On a GPU the current stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
            self.work = None


class Replicated:
    """The replicated parameters of a chunk. Its methods are collective over the axes that replicate them.

    It may be created while parameters are on the meta device: it refers to them by name until the first backward pass.
    """

    def __init__(self, chunk: nn.Module, buckets: Iterable[GradientBucket]):
        self._chunk, self._buckets = chunk, list(buckets)
        self._is_last = False
        self._is_hooked = self._in_order = False

    @property
    def axes(self) -> dict[str, Axis]:
        """Axis of the ranks that replicate each parameter, by name. Parameters with one replica are omitted."""
        return {name: bucket.axis for bucket in self._buckets for name in bucket.names}

    def prepare_backward(self, is_last: bool, in_order: bool = False) -> None:
        """Prepare the hooks for a backward pass. With `is_last`, the hooks start the all-reduces during the pass.

        With `in_order`, the all-reduces start after the last backward pass of the step, and gradients are summed in an
        order that does not depend on the number of ranks.
        """
        self._hook()
        self._is_last, self._in_order = is_last and not in_order, in_order
        for bucket in self._buckets:
            bucket.pending = len(bucket.parameters)

    def start_all_reduces(self) -> None:
        """Start the all-reduces that the step's last backward pass did not start."""
        self._hook()
        for bucket in self._buckets:
            if self._in_order:
                bucket.all_reduce_in_order()
            else:
                bucket.start_all_reduce()

    def wait(self) -> None:
        """Wait for the pending all-reduces. Call it after the last backward pass of a step."""
        self.start_all_reduces()
        for bucket in self._buckets:
            bucket.wait()
        self._is_last = False

    def _hook(self) -> None:
        if self._is_hooked:
            return
        parameters = dict(self._chunk.named_parameters())
        for bucket in self._buckets:
            bucket.parameters = [parameters[name] for name in bucket.names if parameters[name].requires_grad]
            # Weak references, because Python's garbage collector cannot see the cycle through a tensor's hooks.
            hook = partial(Replicated._on_gradient, weakref.proxy(self), weakref.proxy(bucket))
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(hook)
        self._is_hooked = True

    def _on_gradient(self, bucket: GradientBucket, _: Tensor) -> None:
        if not self._is_last:
            return
        assert bucket.work is None, "a gradient was accumulated after its all-reduce had started"
        bucket.pending -= 1
        if bucket.pending == 0:
            bucket.start_all_reduce()


def replicate(chunk: Transformer, mesh: Mesh, bucket_size: int | None = None) -> None:
    """Replicate the chunk's parameters, in place, and record the Replicated that all-reduces their gradients.

    Args:
        chunk: chunk of the model. It is replicated over mesh.dp_cp, and its experts over mesh.edp.
        mesh: this rank's axes.
        bucket_size: minimum bytes of gradients per all-reduce, from successive layers. None: one layer per all-reduce.
    """
    names, buckets = {name for name, _ in chunk.named_parameters()}, []
    for prefix, layer in layers_of(chunk).items():
        in_layer = [f"{prefix}.{name}" for name, _ in layer.named_parameters()]
        experts = [name for name in in_layer if name.startswith(f"{prefix}.{EXPERTS}")]
        dense = [name for name in in_layer if name not in experts]
        buckets += [GradientBucket(mesh.edp, experts), GradientBucket(mesh.dp_cp, dense)]
        names.difference_update(in_layer)
    if bucket_size is not None:
        buckets = [
            bucket
            for axis in (mesh.edp, mesh.dp_cp)
            for bucket in _merge_buckets(chunk, buckets, axis, bucket_size)
        ]
    buckets.append(GradientBucket(mesh.dp_cp, sorted(names)))
    buckets = [bucket for bucket in buckets if bucket.names and bucket.axis.size > 1]
    replicated = Replicated(chunk, buckets)
    record_replication(chunk, Replication(replicated.axes, replicated))


def _merge_buckets(
    chunk: nn.Module, buckets: Sequence[GradientBucket], axis: Axis, size: int
) -> list[GradientBucket]:
    """Merge the buckets over `axis` into buckets of at least `size` bytes, beginning with the last layers of
    the model.
    """
    parameters = dict(chunk.named_parameters())
    merged, missing = [], 0
    for name in reversed([name for bucket in buckets if bucket.axis is axis for name in bucket.names]):
        if missing <= 0:
            merged.append(GradientBucket(axis, []))
            missing = size
        merged[-1].names.append(name)
        missing -= 4 * local(parameters[name]).numel()  # fp32
    return merged
