"""Collectives that return new tensors and have gradients, and the one way from a parameter to its shard.

A collective takes the axis of the mesh that it runs over, so a reader sees every transfer and who takes part. Each is
the gradient of another: the gradient of an all-gather is a reduce-scatter, and that of an all-reduce whose result every
rank uses alike is nothing at all. They are torch's functional collectives: nothing returned was written in place, so
torch.compile traces them whole and orders them by their data.
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

LEAST_BY_COPY_ENGINE = 2**20  # bytes; below, what the ranks' meetings take is most of a direct collective


@dataclass(frozen=True)
class Axis:
    """A dimension of the mesh as one rank sees it: how many ranks stand along it, and which one this is."""

    size: int = 1
    rank: int = 0
    group: ProcessGroup | None = None
    """The ranks along the axis; None when it is this rank alone."""
    name: str = ""
    """The group's name, which functional collectives take."""
    mesh: DeviceMesh | None = None
    """The same ranks as a one-dimensional DeviceMesh, for DTensors; None when the size is 1."""
    direct: bool = False
    """Whether large tensors go by the GPUs' copy engines (copy_engine.py)."""

    def uses_copy_engine(self, x: Tensor) -> bool:
        return self.direct and x.is_cuda and x.numel() * x.element_size() >= LEAST_BY_COPY_ENGINE


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum of x over the axis. Its gradient passes as it is: every rank goes on with the same sum."""
    return x if axis.size == 1 else _AllReduce.apply(x, axis)


def all_reduce_gradient(x: Tensor, axis: Axis) -> Tensor:
    """x itself, the same on every rank of the axis; its gradient is the sum of theirs. The conjugate of all_reduce."""
    return x if axis.size == 1 else _AllReduceGradient.apply(x, axis)


def all_gather(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """The ranks' x one after the other along `dim`; the gradient is reduce-scattered.

    Every rank's x has the same shape. Free of copies when the dimensions before `dim` have size 1.
    """
    return x if axis.size == 1 else _AllGather.apply(x, axis, dim)


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This rank's part along `dim` of the sum of x over the axis; the gradient is all-gathered.

    `dim` is a multiple of the axis's size long. The conjugate of all_gather.
    """
    return x if axis.size == 1 else _ReduceScatter.apply(x, axis, dim)


def all_gather_replicated(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """As all_gather, where every rank goes on to compute the same: the gradient is this rank's part of its own."""
    return x if axis.size == 1 else _AllGatherReplicated.apply(x, axis, dim)


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """Part j of x along dimension 0 goes to rank j; returns what came, in the ranks' order. Its own conjugate."""
    return x if axis.size == 1 else _AllToAll.apply(x, axis)


@dataclass(frozen=True, eq=False)
class PendingAllToAll:
    """Rows on their way: see begin_all_to_all."""

    rows: Tensor
    axis: Axis
    sent: list[int]
    received: list[int]
    back: list[Tensor] = field(default_factory=list)
    """In the backward pass: the gradients on their way."""


def begin_all_to_all(x: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int]) -> PendingAllToAll:
    """As all_to_all, with sent[j] rows of x for rank j and received[j] from it, which end_all_to_all returns.

    What is computed between the two goes on while rows travel. So does, in the backward pass, what computes its
    gradients: of the nodes that wait autograd takes the last one made, so the gradients' way begins, these follow, and
    what ends it comes after them.
    """
    exchange = PendingAllToAll(x, axis, list(sent), list(received))
    return exchange if axis.size == 1 else replace(exchange, rows=_BeginAllToAll.apply(x, exchange))


def end_all_to_all(exchange: PendingAllToAll) -> Tensor:
    """The rows that have come, in the ranks' order."""
    return exchange.rows if exchange.axis.size == 1 else _EndAllToAll.apply(exchange.rows, exchange)


def local_chunk(x: Tensor, axis: Axis) -> Tensor:
    """This rank's part, along dimension 0, of an x that is the same on every rank; the gradient is all-gathered.

    The conjugate of all_gather_replicated. Dimension 0 is a multiple of the axis's size long.
    """
    return x if axis.size == 1 else _LocalChunk.apply(x, axis)


def all_reduce_no_grad(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """The sum (or op "max", "min") of x over the axis, for values that need no gradient."""
    return x if axis.size == 1 else _all_reduce(x, axis, op)


def all_gather_no_grad(x: Tensor, axis: Axis) -> Tensor:
    """The ranks' x one after the other along dimension 0, for values that need no gradient."""
    return x if axis.size == 1 else _all_gather(x, axis, 0)


def any_rank(here: bool, axis: Axis) -> bool:
    """Whether it is so on some rank of the axis: a decision that all of them then share. It waits on the host."""
    return bool(all_reduce_no_grad(torch.tensor(float(here)), axis, "max"))


def gather_json(value: Any, axis: Axis, to_first: bool = False) -> list[Any]:
    """Every rank's value, in the ranks' order, on every rank, or on the first alone (nothing on the others).

    Values are plain JSON in tensors: a rank unpickles nothing. The text of each takes the place of the longest.
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
    """Of the first rank's `values`, one for each rank, this rank's; the others' are not looked at. By the CPU."""
    if axis.size == 1:
        return values[0]
    texts = [json.dumps(value).encode() for value in values] if axis.rank == 0 else []
    longest = torch.tensor([max(map(len, texts), default=0)])
    dist.broadcast(longest, src=0, group=axis.group)
    padded = [torch.frombuffer(bytearray(text.ljust(int(longest))), dtype=torch.uint8) for text in texts]
    own = torch.empty(int(longest), dtype=torch.uint8)
    dist.scatter(own, padded or None, src=0, group=axis.group)
    return json.loads(own.numpy().tobytes())


def begin_all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor | PendingAllReduce:
    """What `wait` turns into the sum of x over the axis, while other work goes on; without gradient."""
    x = x.contiguous()
    if op == "sum" and axis.uses_copy_engine(x) and x.numel() % axis.size == 0:
        return PendingAllReduce(begin_reduce_scatter(x.view(-1), axis), axis, x.shape)
    return _under_way(_ops.all_reduce(x, op, axis.name))


def _under_way(x: Tensor) -> Tensor:
    """What a collective gives. On a CPU it is waited for, so that gloo's threads seldom end two of a group at once:
    they break the heap if DTensor or compiled code made one of them an all-gather (begin_group_all_gather)."""
    return _ops.wait_tensor(x) if x.device.type == "cpu" and not torch.compiler.is_compiling() else x


def begin_all_gather(x: Tensor, axis: Axis) -> Tensor:
    """As begin_all_reduce, for the ranks' x one after the other along dimension 0."""
    if axis.uses_copy_engine(x):
        return torch.ops.megalith_copy_engine.all_gather(x.contiguous(), axis.size, axis.name)
    return _under_way(begin_group_all_gather(x.contiguous(), axis.size, axis.name))


def begin_group_all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """As begin_all_gather, over the group of this name and size; x is contiguous.

    On a CPU the result is allocated here: the operator that allocates it is gloo's ALLGATHER_COALESCED. Each group of
    gloo has two threads, which store the name of what they have ended in one std::string, without a lock (torch 2.13).
    A name of up to 15 characters lies in the string itself; the memory of a longer one is freed by one thread, and
    written or freed again by the other.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return _ops.all_gather_into_tensor(x, size, group)
    gathered = x.new_empty(size * x.shape[0], *x.shape[1:])
    return _ops.all_gather_into_tensor_out(x.detach(), size, group, out=gathered)


@dataclass(frozen=True)
class PendingReduceScatter:
    """The parts of a sum: this rank's own, and [size - 1, ...] of the others, which are on their way."""

    own: Tensor
    others: Tensor

    def sum(self) -> Tensor:
        """In fp32, rounded once; in compiled code the addition is part of what comes next."""
        total = self.own.float()
        for part in _ops.wait_tensor(self.others):
            total = total + part
        return total.to(self.own.dtype)


def begin_reduce_scatter(x: Tensor, axis: Axis) -> Tensor | PendingReduceScatter:
    """As begin_all_reduce, for this rank's part, along dimension 0, of the sum."""
    x = x.contiguous()
    if axis.uses_copy_engine(x):
        others = torch.ops.megalith_copy_engine.scatter(x, axis.size, axis.name)
        return PendingReduceScatter(x.chunk(axis.size)[axis.rank], others)
    return _under_way(_ops.reduce_scatter_tensor(x, "sum", axis.size, axis.name))


@dataclass(frozen=True)
class PendingAllReduce:
    """A sum that goes by copy engines: each rank makes a share of it, the same bits for all, and they are gathered."""

    own: Tensor | PendingReduceScatter
    axis: Axis
    shape: torch.Size

    def all_gather(self) -> Tensor:
        return wait(begin_all_gather(wait(self.own), self.axis)).view(self.shape)


def wait(x: Tensor | PendingReduceScatter | PendingAllReduce) -> Tensor:
    """The result of a begun collective."""
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
    return _under_way(_ops.all_to_all_single(x.contiguous(), received, sent, axis.name))


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
        ctx.back = exchange.back
        ctx.set_materialize_grads(False)  # the gradient has other rows than the result: it comes by `back`
        return _all_to_all_single(x, exchange.axis, exchange.sent, exchange.received)

    @staticmethod
    def backward(ctx, nothing: None):
        return wait(ctx.back.pop()), None


class _EndAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, exchange: PendingAllToAll) -> Tensor:
        ctx.back, ctx.axis = exchange.back, exchange.axis
        ctx.sent, ctx.received = exchange.sent, exchange.received
        return wait(rows)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.back.append(_all_to_all_single(grad, ctx.axis, ctx.received, ctx.sent))
        return None, None


class _LocalChunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.chunk(axis.size)[axis.rank].clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _all_gather(grad, ctx.axis, 0), None
