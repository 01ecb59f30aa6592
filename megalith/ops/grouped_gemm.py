"""Grouped GEMM for a layer's experts: each group of consecutive rows is multiplied by its own matrix.

On a GPU in bf16, torch's grouped GEMM computes all groups in one kernel and reads their ends on the device. Groups of
equal size are a batched matmul. Everything else is a loop, which needs the sizes on the host.

In an oversized buffer, rows after the last group are never read and their results are undefined: a consumer that reads
them must set them to zero.

wgrad is computed separately from dgrad, in the backward pass of `prepare_weight`. Operations between the two in the
forward pass thus come before wgrad in the backward pass, so that an all-to-all started there overlaps with it.

The gradient of a group's bias equals the wgrad for an additional input column, which holds ones, or the factors that
multiply the bias. So the same kernels compute it, in the same order of additions.

The backward pass saves the parameter and casts it again: saved casts would stay in memory for every layer and
micro-batch in flight. If one cast serves all passes of a step, that cast is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from megalith.compat.torch_operators import grouped_mm, unsafe_view
from megalith.ops.compiled import as_one_kernel

ALIGNMENT = 16  # the bytes of a row of each matrix must be a multiple


@dataclass(frozen=True)
class RowGroups:
    """Number of rows per group, on the device and, if known, on the host."""

    counts: Tensor  # int64 [groups]
    sizes: tuple[int, ...] | None = None
    padded: bool = False
    """True if rows may follow the last group."""
    adapters: Tensor | None = None
    """int64 [rows], the adapter of each row, if a batch uses several; otherwise None."""

    @cached_property
    def ends(self) -> Tensor:
        """End of each group's rows, int32 [groups] on the device."""
        return self.counts.cumsum(0).to(torch.int32)

    @cached_property
    def on_host(self) -> tuple[int, ...]:
        """Group sizes on the host. Waits for the device if they are not on the host yet."""
        return tuple(self.counts.tolist()) if self.sizes is None else self.sizes

    @cached_property
    def end(self) -> Tensor | None:
        """End of the last group's rows, int32 [1] on the device. None if no rows follow.

        It is a separate tensor, because kernels launch faster with addresses that are multiples of 16.
        """
        return self.counts.sum(0, keepdim=True, dtype=torch.int32) if self.padded else None

    def group_of_rows(self, rows: int) -> Tensor:
        """Return the group of each of `rows` rows, int64 [rows], without waiting for the device.

        The group of a row after the last group is undefined.
        """
        row_numbers = torch.arange(rows, dtype=torch.int32, device=self.counts.device)
        return torch.searchsorted(self.ends, row_numbers, right=True).clamp(max=len(self.counts) - 1)

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of each group. May wait for the device like `on_host`."""
        return rows[: sum(self.on_host)].split(self.on_host)

    @property
    def even(self) -> bool:
        """True if all groups are known to have the same size."""
        return self.sizes is not None and len(set(self.sizes)) == 1


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """The weights, or the biases, of all groups, prepared for one matmul."""

    value: Tensor  # [groups, out, in] in the matmul's dtype, or [groups, out]
    saved: Tensor  # for the backward pass: the parameter, which is cast again, or the cast
    pending_wgrads: list[Callable[[torch.dtype], Tensor]] = field(default_factory=list)
    """Filled after the matmul's backward pass with a function that computes the weight's gradient in a given dtype."""


def prepare_weight(weight: Tensor, cast: Tensor, stays: bool = False) -> GroupedWeight:
    """Prepare weight [groups, out, in] or bias [groups, out]. `cast` is the tensor in the matmul dtype.

    The gradient has the weight's dtype, summed in fp32 and rounded once. `stays`: the cast exists until the backward
    pass ends, which then reuses it.
    """
    pending_wgrads: list[Callable[[torch.dtype], Tensor]] = []
    return GroupedWeight(
        _Prepare.apply(weight, cast, pending_wgrads), cast if stays else weight.detach(), pending_wgrads
    )


class GroupedGemm:
    """The three matmuls of a Gemm (gemm.py) for each group of rows.

    x is [rows, in], grad [rows, out] and weight [groups, out, in], of one dtype. `kernel` selects the single kernel
    where available.
    """

    def __init__(self, kernel: bool = True):
        self.kernel = kernel

    def cast(self, saved: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight in `dtype` for the backward pass, from `GroupedWeight.saved`."""
        return saved.to(dtype)

    def forward(self, x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        return self._by_rows(x, weight.mT, groups)  # [rows, out]

    def dgrad(self, grad: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        return self._by_rows(grad, weight, groups)  # [rows, in]

    def wgrad(self, grad: Tensor, x: Tensor, groups: RowGroups, dtype: torch.dtype) -> Tensor:
        """Compute the weight gradient [groups, out, in] in this dtype. It is zero for a group without rows."""
        if groups.even and len(x):
            grad, x = (t.view(len(groups.counts), -1, t.shape[1]) for t in (grad, x))
            if grad.is_cuda and grad.dtype != dtype:
                return torch.bmm(grad.mT, x, out_dtype=dtype)
            return torch.bmm(grad.mT, x).to(dtype)
        if self._takes(grad, x.shape[1]):
            result = grouped_mm(grad.mT, x, offs=groups.ends)
            return as_one_kernel(_without_empty, result, groups.counts, dtype)
        pairs = zip(groups.split(grad), groups.split(x))
        return torch.stack([g.T @ rows for g, rows in pairs]).to(dtype)

    def _by_rows(self, rows: Tensor, matrices: Tensor, groups: RowGroups) -> Tensor:
        """Multiply rows [rows, in] by their group's matrix. `matrices` is [groups, in, out]; returns [rows, out]."""
        if groups.even and len(rows):
            y = torch.bmm(rows.view(len(matrices), -1, rows.shape[1]), matrices)
            # Not a plain view, because FSDP2 warns if a module's output is a view.
            return unsafe_view(y, (len(rows), y.shape[2]))
        if self._takes(rows, matrices.shape[2]):
            return grouped_mm(rows, matrices, offs=groups.ends)
        result = [part @ matrix for part, matrix in zip(groups.split(rows), matrices)]
        padding = len(rows) - sum(groups.on_host)
        return torch.cat([*result, result[0].new_zeros(padding, matrices.shape[2])] if padding else result)

    def _takes(self, rows: Tensor, width: int) -> bool:
        return self.kernel and len(rows) > 0 and has_kernel(rows, width)


def has_kernel(rows: Tensor, width: int) -> bool:
    """Return True if torch's grouped GEMM supports these rows [rows, in] with outputs of `width` columns.

    It needs bf16 on a GPU, and rows of a multiple of 16 bytes in both.
    """
    aligned = all(size * rows.element_size() % ALIGNMENT == 0 for size in (rows.shape[1], width))
    return rows.is_cuda and rows.dtype == torch.bfloat16 and aligned


def grouped_linear(x: Tensor, weight: GroupedWeight, groups: RowGroups, gemm: GroupedGemm) -> Tensor:
    """Multiply rows x [rows, in], group by group, with weight [groups, out, in] of the same dtype. Returns [rows, out].

    The weight always gets a gradient, zero for a group without rows.
    """
    return _GroupedLinear.apply(x, weight.value, weight.saved, weight.pending_wgrads, groups, gemm)


def add_bias(
    y: Tensor,
    bias: GroupedWeight,
    groups: RowGroups,
    factors: Tensor | None = None,
    first: int = 0,
    kernel: bool = True,
    fused: bool = False,
) -> Tensor:
    """Add each group's bias [groups, columns] to its rows of y [rows, out]. Returns [rows, out].

    The bias is added to y's columns starting at `first`. With `factors`, float32 [rows, 1], it is first multiplied by
    the row's factor. `kernel` is as in GroupedGemm; `fused` runs one compiled kernel on a GPU. The bias always gets a
    gradient.
    """
    return _AddBias.apply(
        y, bias.value, bias.saved, bias.pending_wgrads, factors, groups, first, kernel, fused
    )


class _Prepare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, cast: Tensor, pending_wgrads: list) -> Tensor:
        ctx.pending_wgrads, ctx.dtype = pending_wgrads, weight.dtype
        ctx.set_materialize_grads(False)  # the incoming gradient is None
        return cast.view_as(cast)

    @staticmethod
    def backward(ctx, nothing: None):
        return ctx.pending_wgrads.pop()(ctx.dtype), None, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        saved: Tensor,
        pending_wgrads: list,
        groups: RowGroups,
        gemm: GroupedGemm,
    ):
        ctx.save_for_backward(x, saved)
        ctx.pending_wgrads, ctx.groups, ctx.gemm = pending_wgrads, groups, gemm
        return gemm.forward(x, weight, groups)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, saved = ctx.saved_tensors
        grad, grad_x = grad.contiguous(), None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.gemm.dgrad(grad, ctx.gemm.cast(saved, x.dtype), ctx.groups)
        if ctx.needs_input_grad[1]:
            ctx.pending_wgrads.append(partial(ctx.gemm.wgrad, grad, x, ctx.groups))
        return grad_x, None, None, None, None, None


class _AddBias(torch.autograd.Function):
    """Adds a bias per group of rows, multiplied by a factor per row."""

    @staticmethod
    def forward(
        ctx,
        y: Tensor,
        bias: Tensor,
        saved: Tensor,
        pending_wgrads: list,
        factors: Tensor | None,
        groups: RowGroups,
        first: int,
        kernel: bool,
        fused: bool,
    ) -> Tensor:
        group = groups.group_of_rows(len(y))
        ctx.save_for_backward(saved, factors, group)
        ctx.pending_wgrads, ctx.groups, ctx.first, ctx.kernel, ctx.fused = (
            pending_wgrads,
            groups,
            first,
            kernel,
            fused,
        )
        return _run(fused, _biased, y, bias, factors, group, first)

    @staticmethod
    def backward(ctx, grad: Tensor):
        saved, factors, group = ctx.saved_tensors
        columns, grad_factors = grad.narrow(1, ctx.first, saved.shape[1]), None
        if ctx.needs_input_grad[1]:
            ctx.pending_wgrads.append(
                partial(_bias_gradient, columns.contiguous(), factors, ctx.groups, ctx.kernel)
            )
        if ctx.needs_input_grad[4]:
            grad_factors = _run(ctx.fused, _factor_gradient, columns, saved, group)
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
    """Compute the gradient of the row factors, float32 [rows, 1], from grad [rows, columns]."""
    return (grad * bias.to(grad.dtype)[group]).sum(1, keepdim=True, dtype=torch.float32)


def _bias_gradient(
    grad: Tensor, factors: Tensor | None, groups: RowGroups, kernel: bool, dtype: torch.dtype
) -> Tensor:
    """Compute the bias gradient [groups, columns] from grad [rows, columns] and the row factors [rows, 1].

    `factors` is None if all factors are 1.
    """
    x = grad.new_ones(len(grad), 1) if factors is None else factors.to(grad.dtype)
    width = ALIGNMENT // x.element_size()  # minimum number of columns for the kernel
    if kernel and not groups.even and has_kernel(grad, width):
        x = x.expand(-1, width).contiguous()
    return GroupedGemm(kernel).wgrad(grad, x, groups, dtype)[..., 0]


def _without_empty(result: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Zero the results of groups without rows, which the kernels of some GPUs leave uninitialized."""
    return torch.where((counts == 0)[:, None, None], 0.0, result).to(dtype)
