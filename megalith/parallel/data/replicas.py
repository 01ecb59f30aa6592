"""Replicas: parameters that are whole on every rank of an axis, and the all-reduce of their gradients.

With `no_shard` every rank has all parameters of one process, which layers cast where they use them, and the fp32
gradients that autograd accumulates over the micro-batches. They are all-reduced in place in the backward pass of the
step's last micro-batch: as soon as every parameter of a bucket has its gradient, one all-reduce starts, and overlaps
the backward passes of the layers before. A layer is a bucket; its experts are one of their own, as fewer ranks have
replicas of them; and what is outside of the layers is one, so that a tied weight is reduced once.

All ranks of an axis have to start their all-reduces in the same order. They run the same code on their micro-batches,
and of the ready nodes autograd takes the one made last: a layer's gradients are complete before any of the layer before
it, on every rank. A bucket in which some parameter got no gradient in that pass, which depends on the configuration
only, is started after it, in the model's order.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import AllreduceCoalescedOptions, Work

from megalith.comm.collectives import Axis, local
from megalith.models.transformer import Transformer, layers_of
from megalith.parallel.mesh import Mesh
from megalith.parallel.seams import plug

EXPERTS = "mlp.experts."  # what the names of a layer's experts begin with


@dataclass(eq=False)
class GradientBucket:
    """Parameters whose gradients are summed together, over the axis that they are copied over."""

    axis: Axis
    names: list[str]
    trained: list[nn.Parameter] = field(default_factory=list)
    missing: int = 0
    """How many have no gradient yet from the pass that goes on."""
    sums: Work | None = None
    """Under way."""

    @torch.no_grad()
    def begin(self) -> None:
        """Begins to sum the gradients there are, unless that has begun."""
        if self.sums is not None:
            return
        gradients = [local(parameter.grad) for parameter in self.trained if parameter.grad is not None]
        if gradients:
            options = AllreduceCoalescedOptions()  # a sum
            options.asyncOp = True
            self.sums = self.axis.group.allreduce_coalesced(gradients, options)

    def wait(self) -> None:
        """On a GPU what is launched from here on waits, and not the host."""
        if self.sums is not None:
            self.sums.wait()
            self.sums = None


class Replicated:
    """The parameters of a chunk that are copied: every rank of their axes makes the same calls.

    Made while parameters may still be on the meta device: they are known by their names until the first backward pass.
    """

    def __init__(self, chunk: nn.Module, buckets: Iterable[GradientBucket]):
        self._chunk, self._buckets = chunk, list(buckets)
        self._is_last = False
        self._is_hooked = False

    @property
    def axes(self) -> dict[str, Axis]:
        """By a parameter's name the ranks that hold copies of it; without those that stand on one rank."""
        return {name: bucket.axis for bucket in self._buckets for name in bucket.names}

    def prepare_backward(self, is_last: bool) -> None:
        """Before a backward pass; in the one that `is_last` the sums begin."""
        self._hook()
        self._is_last = is_last
        for bucket in self._buckets:
            bucket.missing = len(bucket.trained)

    def begin(self) -> None:
        """After the step's last backward pass: begins the sums that have not begun in it."""
        self._hook()
        for bucket in self._buckets:
            bucket.begin()

    def wait(self) -> None:
        """After all passes of the step: the gradients are sums from here on."""
        self.begin()
        for bucket in self._buckets:
            bucket.wait()
        self._is_last = False

    def _hook(self) -> None:
        if self._is_hooked:
            return
        parameters = dict(self._chunk.named_parameters())
        for bucket in self._buckets:
            bucket.trained = [parameters[name] for name in bucket.names if parameters[name].requires_grad]
            # Weakly: torch keeps a tensor's hooks where Python's collector does not find the way back to the tensor.
            added = partial(Replicated._added, weakref.proxy(self), weakref.proxy(bucket))
            for parameter in bucket.trained:
                parameter.register_post_accumulate_grad_hook(added)
        self._is_hooked = True

    def _added(self, bucket: GradientBucket, _: Tensor) -> None:
        if not self._is_last:
            return
        assert bucket.sums is None, "a gradient was added to after its sum over the ranks had begun"
        bucket.missing -= 1
        if bucket.missing == 0:
            bucket.begin()


def replicate(chunk: Transformer, mesh: Mesh, bucket_size: int | None = None) -> None:
    """Lets this rank's chunk have its parameters whole, in place: `chunk.replicated` sums their gradients.

    Dense parameters are copied over mesh.dp_cp, experts over mesh.edp. `bucket_size`: the least bytes of gradients that
    are reduced together, of layers that follow each other; None: a layer's.
    """
    names, buckets = {name for name, _ in chunk.named_parameters()}, []
    for prefix, layer in layers_of(chunk).items():
        own = [f"{prefix}.{name}" for name, _ in layer.named_parameters()]
        experts = [name for name in own if name.startswith(f"{prefix}.{EXPERTS}")]
        dense = [name for name in own if name not in experts]
        buckets += [GradientBucket(mesh.edp, experts), GradientBucket(mesh.dp_cp, dense)]
        names.difference_update(own)
    if bucket_size is not None:
        buckets = [
            bucket for axis in (mesh.edp, mesh.dp_cp) for bucket in _merged(chunk, buckets, axis, bucket_size)
        ]
    buckets.append(GradientBucket(mesh.dp_cp, sorted(names)))
    buckets = [bucket for bucket in buckets if bucket.names and bucket.axis.size > 1]
    plug(chunk, "replicated", Replicated(chunk, buckets))


def _merged(
    chunk: nn.Module, buckets: Sequence[GradientBucket], axis: Axis, size: int
) -> list[GradientBucket]:
    """The parameters of the buckets over `axis` in buckets of `size` bytes or somewhat more, from the model's end."""
    parameters = dict(chunk.named_parameters())
    merged, left = [], 0
    for name in reversed([name for bucket in buckets if bucket.axis is axis for name in bucket.names]):
        if left <= 0:
            merged.append(GradientBucket(axis, []))
            left = size
        merged[-1].names.append(name)
        left -= 4 * local(parameters[name]).numel()  # fp32
    return merged


def replica_axes(chunk: nn.Module) -> Mapping[str, Axis]:
    """By name the plain copies in a chunk, which a DTensor's placements do not tell of: see Replicated.axes."""
    replicated = getattr(chunk, "replicated", None)
    return {**getattr(chunk, "copied", {}), **({} if replicated is None else replicated.axes)}
