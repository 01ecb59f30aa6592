"""Matmuls of consecutive groups of rows, each group with a matrix of its own: what the experts of a layer compute.

On a GPU, in bf16, torch's grouped GEMM takes all groups in one kernel and reads where they end on the device. Groups
of one size are a batched matmul. Anything else is a loop, which needs the sizes on the host.

A weight's gradient is made apart from that of the rows, in the backward pass of what prepared the weight. Nobody waits
for it but the optimizer, so what comes between the two forward comes before it in the backward pass: an exchange of
rows that begins there is under way while the weights' gradients are computed.

A group may have a bias too. Its gradient is what a weight's is for one more column of the input, which holds ones, or
the factors that the bias was multiplied by; so the same kernels make it, in the same order of additions.

The backward pass keeps a weight as its parameter has it and casts it again: what was cast for the forward pass would
stay until then, for every layer and every micro-batch in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from megalith.ops.compiled import as_one_kernel

ALIGNMENT = 16  # bytes that a row of each matrix has to be a multiple of

_grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm


@dataclass(frozen=True)
class Groups:
    """How many rows there are of each group, on the device, and on the host where they are known there."""

    counts: Tensor  # int64 [groups]
    sizes: tuple[int, ...] | None = None

    def on_host(self) -> tuple[int, ...]:
        """The sizes; waits for the device where only that knows them."""
        return tuple(self.counts.tolist()) if self.sizes is None else self.sizes

    def of_rows(self, rows: int) -> Tensor:
        """The group of each of all `rows` rows: int64 [rows], without waiting for the device."""
        numbers = torch.arange(len(self.counts), device=self.counts.device)
        return numbers.repeat_interleave(self.counts, output_size=rows)

    @property
    def even(self) -> bool:
        """Whether all are known to be of one size."""
        return self.sizes is not None and len(set(self.sizes)) == 1


@dataclass(frozen=True, eq=False)
class Prepared:
    """A weight as one product takes it, or a bias."""

    value: Tensor  # [groups, out, in] in the product's dtype, or [groups, out]
    kept: Tensor  # what the backward pass casts again: the same, in the parameter's dtype and memory
    owed: list[Callable[[torch.dtype], Tensor]] = field(default_factory=list)
    """After the product's backward pass: what computes the weight's gradient, in a dtype."""


def prepared(weight: Tensor, cast: Tensor) -> Prepared:
    """weight [groups, out, in] or bias [groups, out], which `cast` has in the products' dtype. Its gradient has its own
    dtype, summed in fp32 and rounded to it once."""
    owed: list[Callable[[torch.dtype], Tensor]] = []
    return Prepared(_Prepare.apply(weight, cast, owed), weight.detach(), owed)


def grouped_matmul(x: Tensor, weight: Prepared, groups: Groups, grouped: bool = True) -> Tensor:
    """Rows x [rows, in], group after group, by weight [groups, out, in] of the same dtype → [rows, out].

    `grouped` asks for one kernel where there is one. The weight always gets a gradient, zero for a group without rows.
    """
    if groups.even and len(x):
        return EvenMatmul.apply(x, weight.value, weight.kept, weight.owed)
    if grouped and len(x) and has_kernel(x, *weight.value.shape[1:]):
        return GroupedMatmul.apply(x, weight.value, weight.kept, weight.owed, groups.counts)
    return LoopedMatmul.apply(x, weight.value, weight.kept, weight.owed, groups.on_host())


def add_bias(
    y: Tensor,
    bias: Prepared,
    groups: Groups,
    factors: Tensor | None = None,
    first: int = 0,
    grouped: bool = True,
    fused: bool = False,
) -> Tensor:
    """Rows y [rows, out], group after group, plus the bias [groups, columns] of their group → [rows, out].

    It is added to the columns from `first` on, times the row's factor where there are `factors` float32 [rows, 1].
    `grouped` is as of grouped_matmul; `fused`: as one compiled kernel on a GPU. The bias always gets a gradient.
    """
    return AddBias.apply(y, bias.value, bias.kept, bias.owed, factors, groups, first, grouped, fused)


def has_kernel(x: Tensor, *sizes: int) -> bool:
    """Whether torch's grouped GEMM takes x, and rows of these sizes: bf16 on a GPU, a multiple of 16 bytes long."""
    aligned = all(size * x.element_size() % ALIGNMENT == 0 for size in sizes)
    return x.is_cuda and x.dtype == torch.bfloat16 and aligned


class _Prepare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, cast: Tensor, owed: list) -> Tensor:
        ctx.owed, ctx.dtype = owed, weight.dtype
        ctx.set_materialize_grads(False)  # what comes back is None
        return cast.view_as(cast)

    @staticmethod
    def backward(ctx, nothing: None):
        return ctx.owed.pop()(ctx.dtype), None, None


class EvenMatmul(torch.autograd.Function):
    """A batched matmul: all groups have as many rows."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, kept: Tensor, owed: list) -> Tensor:
        ctx.save_for_backward(x, kept)
        ctx.owed = owed
        # FSDP2 warns of a module's output that is a view, which a plain one would be.
        y = torch.bmm(_by_group(x, len(weight)), weight.mT)
        return torch.ops.aten._unsafe_view(y, (len(x), weight.shape[1]))

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, kept = ctx.saved_tensors
        grad, grad_x = _by_group(grad, len(kept)), None
        if ctx.needs_input_grad[0]:
            grad_x = torch.bmm(grad, kept.to(x.dtype)).flatten(0, 1)
        if ctx.needs_input_grad[1]:
            ctx.owed.append(partial(_even_gradient, grad, _by_group(x, len(kept))))
        return grad_x, None, None, None


class GroupedMatmul(torch.autograd.Function):
    """One kernel forward, one for each gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, kept: Tensor, owed: list, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0).to(torch.int32)
        ctx.save_for_backward(x, kept, counts, ends)
        ctx.owed = owed
        return _grouped_mm(x, weight.mT, offs=ends)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, kept, counts, ends = ctx.saved_tensors
        grad, grad_x = grad.contiguous(), None
        if ctx.needs_input_grad[0]:
            grad_x = _grouped_mm(grad, kept.to(x.dtype), offs=ends)
        if ctx.needs_input_grad[1]:
            ctx.owed.append(partial(_grouped_gradient, grad, x, counts, ends))
        return grad_x, None, None, None, None


class LoopedMatmul(torch.autograd.Function):
    """A matmul for each group that has rows."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, kept: Tensor, owed: list, sizes: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x, kept)
        ctx.owed, ctx.sizes = owed, sizes
        return torch.cat([rows @ matrix.T for rows, matrix in zip(x.split(sizes), weight)])

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, kept = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            weight = kept.to(x.dtype)
            grad_x = torch.cat([rows @ matrix for rows, matrix in zip(grad.split(ctx.sizes), weight)])
        if ctx.needs_input_grad[1]:
            ctx.owed.append(partial(_looped_gradient, grad, x, ctx.sizes))
        return grad_x, None, None, None, None


class AddBias(torch.autograd.Function):
    """A bias for each group of rows, with a factor for each row."""

    @staticmethod
    def forward(
        ctx,
        y: Tensor,
        bias: Tensor,
        kept: Tensor,
        owed: list,
        factors: Tensor | None,
        groups: Groups,
        first: int,
        grouped: bool,
        fused: bool,
    ) -> Tensor:
        group = groups.of_rows(len(y))
        ctx.save_for_backward(kept, factors, group)
        ctx.owed, ctx.groups, ctx.first, ctx.grouped, ctx.fused = owed, groups, first, grouped, fused
        return _run(fused, _biased, y, bias, factors, group, first)

    @staticmethod
    def backward(ctx, grad: Tensor):
        kept, factors, group = ctx.saved_tensors
        columns, grad_factors = grad.narrow(1, ctx.first, kept.shape[1]), None
        if ctx.needs_input_grad[1]:
            ctx.owed.append(partial(_bias_gradient, columns.contiguous(), factors, ctx.groups, ctx.grouped))
        if ctx.needs_input_grad[4]:
            grad_factors = _run(ctx.fused, _factor_gradient, columns, kept, group)
        return grad, None, None, None, grad_factors, None, None, None, None


def _run(fused: bool, function: Callable, *args) -> Tensor:
    return as_one_kernel(function, *args, rows_vary=True) if fused else function(*args)


def _biased(y: Tensor, bias: Tensor, factors: Tensor | None, group: Tensor, first: int) -> Tensor:
    added = bias[group]
    if factors is not None:
        added = added * factors.to(y.dtype)
    if added.shape[1] < y.shape[1]:
        added = F.pad(added, (first, y.shape[1] - first - added.shape[1]))
    return y + added


def _factor_gradient(grad: Tensor, bias: Tensor, group: Tensor) -> Tensor:
    """grad [rows, columns] → float32 [rows, 1]."""
    return (grad * bias.to(grad.dtype)[group]).sum(1, keepdim=True, dtype=torch.float32)


def _bias_gradient(
    grad: Tensor, factors: Tensor | None, groups: Groups, grouped: bool, dtype: torch.dtype
) -> Tensor:
    """grad [rows, columns], the rows' factors [rows, 1] or None for ones → [groups, columns]."""
    count = len(groups.counts)
    x = grad.new_ones(len(grad), 1) if factors is None else factors.to(grad.dtype)
    if groups.even and len(grad):
        found = _even_gradient(_by_group(grad, count), _by_group(x, count), dtype)
    else:
        wide = x.expand(-1, ALIGNMENT // x.element_size())  # as many columns as the kernel needs
        if grouped and len(grad) and has_kernel(grad, grad.shape[1]):
            ends = groups.counts.cumsum(0).to(torch.int32)
            found = _grouped_gradient(grad, wide.contiguous(), groups.counts, ends, dtype)
        else:
            found = _looped_gradient(grad, x, groups.on_host(), dtype)
    return found[..., 0]


def _by_group(rows: Tensor, groups: int) -> Tensor:
    return rows.view(groups, -1, rows.shape[1])


def _even_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """grad [groups, size, out], x [groups, size, in] → [groups, out, in]."""
    if grad.is_cuda and grad.dtype != dtype:
        return torch.bmm(grad.mT, x, out_dtype=dtype)
    return torch.bmm(grad.mT, x).to(dtype)


def _grouped_gradient(grad: Tensor, x: Tensor, counts: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """grad [rows, out], x [rows, in] → [groups, out, in]."""
    return as_one_kernel(_without_empty, _grouped_mm(grad.mT, x, offs=ends), counts, dtype)


def _without_empty(found: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros for groups without rows, to which the kernels of some GPUs leave what they find in memory."""
    return torch.where((counts == 0)[:, None, None], 0.0, found).to(dtype)


def _looped_gradient(grad: Tensor, x: Tensor, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """grad [rows, out], x [rows, in] → [groups, out, in]."""
    return torch.stack([g.T @ rows for g, rows in zip(grad.split(sizes), x.split(sizes))]).to(dtype)
