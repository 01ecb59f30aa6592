"""Differentiable collectives.

A collective takes the mesh axis that it runs over, so that every transfer and its ranks are visible in the code. Its
gradient is another collective: the gradient of an all-gather is a reduce-scatter. An all-reduce whose result all ranks
use in the same way passes its gradient through. The implementation uses torch's functional collectives, which return
new tensors, so that torch.compile can trace them and order them by their data dependencies.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from megalith.compat.torch_operators import functional_collectives as _ops

MIN_COPY_ENGINE_BYTES = 2**20  # for smaller tensors, synchronization takes most of the time


@dataclass(frozen=True)
class Axis:
    """A mesh dimension from one rank's point of view."""

    size: int = 1
    """Number of ranks."""
    rank: int = 0
    """This rank's coordinate."""
    group: ProcessGroup | None = None
    """Process group of the ranks; None for size 1."""
    name: str = ""
    """The group's name, for functional collectives."""
    mesh: DeviceMesh | None = None
    """One-dimensional DeviceMesh of the ranks, for DTensors; None for size 1."""
    direct: bool = False
    """True if copy engines transfer large tensors (copy_engine.py)."""

    def uses_copy_engine(self, x: Tensor) -> bool:
        return self.direct and x.is_cuda and x.numel() * x.element_size() >= MIN_COPY_ENGINE_BYTES


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of x over the axis.

    The gradient passes through unchanged, because every rank uses the sum identically.
    """
    return x if axis.size == 1 else _AllReduce.apply(x, axis)


def all_reduce_gradient(x: Tensor, axis: Axis) -> Tensor:
    """Return x, which must be the same on all ranks.

    The backward pass sums the gradient over the ranks. Adjoint of all_reduce.
    """
    return x if axis.size == 1 else _AllReduceGradient.apply(x, axis)


def all_gather(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Concatenate the ranks' x along `dim`. The backward pass reduce-scatters the gradient.

    Every rank's x has the same shape. No copy is made if the dimensions before `dim` have size 1.
    """
    return x if axis.size == 1 else _AllGather.apply(x, axis, dim)


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Return this rank's shard, along `dim`, of the sum of x over the axis.

    The backward pass all-gathers the gradient.

    The axis's size divides dimension `dim`. Adjoint of all_gather.
    """
    return x if axis.size == 1 else _ReduceScatter.apply(x, axis, dim)


def all_gather_replicated(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Concatenate the ranks' x along `dim`.

    All ranks must compute the same from the result. The gradient is then this rank's slice, without communication.
    """
    return x if axis.size == 1 else _AllGatherReplicated.apply(x, axis, dim)


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """Send chunk j of x along dimension 0 to rank j. Returns the received chunks in rank order. Self-adjoint."""
    return x if axis.size == 1 else _AllToAll.apply(x, axis)


@dataclass(frozen=True, eq=False)
class PendingAllToAll:
    """An all-to-all in flight (see begin_all_to_all)."""

    rows: Tensor
    axis: Axis
    sent: list[int]
    received: list[int]
    gradients: list[Tensor] = field(default_factory=list)
    """Gradients in flight, in the backward pass."""


def begin_all_to_all(x: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int]) -> PendingAllToAll:
    """Start an all-to-all that sends sent[j] rows of x to rank j and receives received[j] rows from it.

    end_all_to_all returns the received rows.

    Computation between the two calls overlaps the transfer. In the backward pass, the computation's backward pass
    overlaps the transfer of the gradients: of the nodes that are ready, autograd runs the most recently created first,
    so the transfer starts before that backward pass and is waited for after it.
    """
    exchange = PendingAllToAll(x, axis, list(sent), list(received))
    return exchange if axis.size == 1 else replace(exchange, rows=_BeginAllToAll.apply(x, exchange))


def end_all_to_all(exchange: PendingAllToAll) -> Tensor:
    """Return the received rows in rank order."""
    return exchange.rows if exchange.axis.size == 1 else _EndAllToAll.apply(exchange.rows, exchange)


def local_chunk(x: Tensor, axis: Axis) -> Tensor:
    """Return this rank's chunk, along dimension 0, of an x that is the same on all ranks.

    The backward pass all-gathers the gradient.

    Adjoint of all_gather_replicated. The axis's size divides dimension 0.
    """
    return x if axis.size == 1 else _LocalChunk.apply(x, axis)


def all_reduce_no_grad(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Return the sum (or op "max", "min") of x over the axis. Not differentiable."""
    return x if axis.size == 1 else _all_reduce(x, axis, op)


def all_gather_no_grad(x: Tensor, axis: Axis) -> Tensor:
    """Concatenate the ranks' x along dimension 0. Not differentiable."""
    return x if axis.size == 1 else _all_gather(x, axis, 0)


def any_rank(flag: bool, axis: Axis) -> bool:
    """Return True on all ranks if `flag` is True on some rank of the axis. The host waits for the result."""
    return bool(all_reduce_no_grad(torch.tensor(float(flag)), axis, "max"))


def gather_json(value: Any, axis: Axis, to_first: bool = False) -> list[Any]:
    """Return all ranks' JSON values in rank order. With `to_first`, return an empty list on all but the first rank.

    Values travel as JSON text in tensors, padded to the longest, so that no rank unpickles anything.
    """
    if axis.size == 1:
        return [value]
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    # The world's group has a backend for both.
    device = axis.mesh.device_type if axis.mesh is not None else "cpu"
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(axis.size)]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device), group=axis.group)
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    texts = [torch.empty_like(padded) for _ in sizes] if axis.rank == 0 or not to_first else []
    if to_first:
        dist.gather(padded, texts or None, dst=0, group=axis.group)
    else:
        dist.all_gather(texts, padded, group=axis.group)
    return [json.loads(text[: int(size)].cpu().numpy().tobytes()) for text, size in zip(texts, sizes)]


def scatter_json(values: Sequence[Any], axis: Axis) -> Any:
    """Return this rank's element of the first rank's `values`, which has one per rank. Runs on the CPU."""
    if axis.size == 1:
        return values[0]
    texts = [json.dumps(value).encode() for value in values] if axis.rank == 0 else []
    longest = torch.tensor([max(map(len, texts), default=0)])
    dist.broadcast(longest, src=0, group=axis.group)
    padded = [torch.frombuffer(bytearray(text.ljust(int(longest))), dtype=torch.uint8) for text in texts]
    text = torch.empty(int(longest), dtype=torch.uint8)
    dist.scatter(text, padded or None, src=0, group=axis.group)
    return json.loads(text.numpy().tobytes())


def begin_all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor | PendingAllReduce:
    """Start an all-reduce. `wait` returns the result. Not differentiable."""
    x = x.contiguous()
    if op == "sum" and axis.uses_copy_engine(x) and x.numel() % axis.size == 0:
        return PendingAllReduce(begin_reduce_scatter(x.view(-1), axis), axis, x.shape)
    return _wait_on_cpu(_ops.all_reduce(x, op, axis.name))


def _wait_on_cpu(x: Tensor) -> Tensor:
    """Return a collective's result. On a CPU, wait for it first.

    gloo's threads corrupt the heap if they end two collectives of a group at the same time and one of these is an
    all-gather that DTensor or compiled code started (begin_group_all_gather).
    """
    return _ops.wait_tensor(x) if x.device.type == "cpu" and not torch.compiler.is_compiling() else x


def begin_all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Start an all-gather along dimension 0. `wait` returns the result. Not differentiable."""
    if axis.uses_copy_engine(x):
        return torch.ops.megalith_copy_engine.all_gather(x.contiguous(), axis.size, axis.name)
    return _wait_on_cpu(begin_group_all_gather(x.contiguous(), axis.size, axis.name))


def begin_group_all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """Start an all-gather of a contiguous x over the group of this name and size.

    On a CPU the result is allocated here, because the operator that allocates it runs gloo's ALLGATHER_COALESCED. Each
    group of gloo has two threads, which store the name of the collective that they ended in one std::string, without a
    lock (torch 2.13). Names of up to 15 characters are stored in the string itself; the memory of a longer one is freed
    by one thread, and written or freed again by the other.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return _ops.all_gather_into_tensor(x, size, group)
    gathered = x.new_empty(size * x.shape[0], *x.shape[1:])
    return _ops.all_gather_into_tensor_out(x.detach(), size, group, out=gathered)


@dataclass(frozen=True)
class PendingReduceScatter:
    """A reduce-scatter in flight: this rank's term, and the other ranks' terms [size - 1, ...] to be added."""

    local: Tensor
    remote: Tensor

    def sum(self) -> Tensor:
        """Return the sum, computed in fp32 and rounded once.

        Compiled code fuses it with the operations that follow.
        """
        total = self.local.float()
        for part in _ops.wait_tensor(self.remote):
            total = total + part
        return total.to(self.local.dtype)


def begin_reduce_scatter(x: Tensor, axis: Axis) -> Tensor | PendingReduceScatter:
    """Start a reduce-scatter along dimension 0. `wait` returns this rank's chunk of the sum. Not differentiable."""
    x = x.contiguous()
    if axis.uses_copy_engine(x):
        remote = torch.ops.megalith_copy_engine.scatter(x, axis.size, axis.name)
        return PendingReduceScatter(x.chunk(axis.size)[axis.rank], remote)
    return _wait_on_cpu(_ops.reduce_scatter_tensor(x, "sum", axis.size, axis.name))


@dataclass(frozen=True)
class PendingAllReduce:
    """An all-reduce by copy engines.

    Each rank sums a chunk and all chunks are gathered, so all ranks get the same bits.
    """

    chunk: Tensor | PendingReduceScatter
    axis: Axis
    shape: torch.Size

    def all_gather(self) -> Tensor:
        return wait(begin_all_gather(wait(self.chunk), self.axis)).view(self.shape)


def wait(x: Tensor | PendingReduceScatter | PendingAllReduce) -> Tensor:
    """Wait for a collective and return its result."""
    if isinstance(x, PendingAllReduce):
        return x.all_gather()
    return x.sum() if isinstance(x, PendingReduceScatter) else _ops.wait_tensor(x)


def _all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    return wait(begin_all_reduce(x, axis, op))


def _all_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return wait(begin_all_gather(x.movedim(dim, 0), axis)).movedim(0, dim)


def _reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return wait(begin_reduce_scatter(x.movedim(dim, 0), axis)).movedim(0, dim)


def _all_to_all(x: Tensor, axis: Axis) -> Tensor:
    sizes = [x.shape[0] // axis.size] * axis.size
    return wait(_all_to_all_single(x, axis, sizes, sizes))


def _all_to_all_single(x: Tensor, axis: Axis, sent: list[int], received: list[int]) -> Tensor:
    return _wait_on_cpu(_ops.all_to_all_single(x.contiguous(), received, sent, axis.name))


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        return _all_reduce(x, axis)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


class _AllReduceGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _all_reduce(grad, ctx.axis), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _all_gather(x, axis, dim)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _reduce_scatter(grad, ctx.axis, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _reduce_scatter(x, axis, dim)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _all_gather(grad, ctx.axis, ctx.dim), None, None


class _AllGatherReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _all_gather(x, axis, dim)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.chunk(ctx.axis.size, ctx.dim)[ctx.axis.rank].contiguous(), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _all_to_all(x, axis)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _all_to_all(grad, ctx.axis), None


class _BeginAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, exchange: PendingAllToAll) -> Tensor:
        ctx.gradients = exchange.gradients
        ctx.set_materialize_grads(False)  # the gradient has other rows than the result: `gradients` has it
        return _all_to_all_single(x, exchange.axis, exchange.sent, exchange.received)

    @staticmethod
    def backward(ctx, nothing: None):
        return wait(ctx.gradients.pop()), None


class _EndAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, exchange: PendingAllToAll) -> Tensor:
        ctx.gradients, ctx.axis = exchange.gradients, exchange.axis
        ctx.sent, ctx.received = exchange.sent, exchange.received
        return wait(rows)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.gradients.append(_all_to_all_single(grad, ctx.axis, ctx.received, ctx.sent))
        return None, None


class _LocalChunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.chunk(axis.size)[axis.rank].clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _all_gather(grad, ctx.axis, 0), None
