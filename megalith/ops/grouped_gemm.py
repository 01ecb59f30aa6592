"""Matmuls of consecutive groups of rows, each group with a matrix of its own: what the experts of a layer compute.

On a GPU, in bf16, torch's grouped GEMM takes all groups in one kernel and reads where they end on the device. Groups
of one size are a batched matmul. Anything else is a loop, which needs the sizes on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

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

    @property
    def even(self) -> bool:
        """Whether all are known to be of one size."""
        return self.sizes is not None and len(set(self.sizes)) == 1


def grouped_matmul(x: Tensor, weight: Tensor, groups: Groups, grouped: bool = True) -> Tensor:
    """Rows x [rows, in], group after group, by weight [groups, out, in] of the same dtype → [rows, out].

    `grouped` asks for one kernel where there is one. The weight always gets a gradient, zero for a group without rows.
    """
    if groups.even and len(x):
        rows = x.view(len(weight), -1, x.shape[1])  # [groups, size, in]
        # FSDP2 warns of a module's output that is a view, which a plain one would be.
        return torch.ops.aten._unsafe_view(torch.bmm(rows, weight.mT), (len(x), weight.shape[1]))
    if grouped and len(x) and has_kernel(x, weight):
        return GroupedMatmul.apply(x, weight, groups.counts)
    return LoopedMatmul.apply(x, weight, groups.on_host())


def has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped GEMM takes these: bf16 on a GPU, rows a multiple of 16 bytes long."""
    aligned = all(size * x.element_size() % ALIGNMENT == 0 for size in weight.shape[1:])
    return x.is_cuda and x.dtype == torch.bfloat16 and aligned


class GroupedMatmul(torch.autograd.Function):
    """One kernel forward, one for each gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0).to(torch.int32)
        ctx.save_for_backward(x, weight, counts, ends)
        return _grouped_mm(x, weight.mT, offs=ends)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, counts, ends = ctx.saved_tensors
        grad, grad_x, grad_weight = grad.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            grad_x = _grouped_mm(grad, weight, offs=ends)
        if ctx.needs_input_grad[1]:
            grad_weight = _grouped_mm(grad.mT, x, offs=ends)  # [groups, out, in]
            # The kernels of some GPUs leave what they find in memory to a group without rows.
            grad_weight.masked_fill_((counts == 0)[:, None, None], 0.0)
        return grad_x, grad_weight, None


class LoopedMatmul(torch.autograd.Function):
    """A matmul for each group that has rows."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, sizes: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        return torch.cat([rows @ matrix.T for rows, matrix in zip(x.split(sizes), weight)])

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        grads, grad_x, grad_weight = grad.split(ctx.sizes), None, None
        if ctx.needs_input_grad[0]:
            grad_x = torch.cat([rows @ matrix for rows, matrix in zip(grads, weight)])
        if ctx.needs_input_grad[1]:
            grad_weight = torch.stack([g.T @ rows for g, rows in zip(grads, x.split(ctx.sizes))])
        return grad_x, grad_weight, None
