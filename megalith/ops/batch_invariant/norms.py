"""LayerNorm and RMSNorm that sum their statistics in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.ops import kernels
from megalith.ops.batch_invariant.elementwise import sum_by_halves, sum_by_pairs
from megalith.ops.batch_invariant.matmul import local_parts

if kernels.AVAILABLE:
    from megalith.ops.kernels.batch_invariant_kernels import row_norm


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, zero_centred: bool) -> Tensor:
    """Normalize x [..., width] as ops.fused_norm.norm does, in fp32, and round once."""
    factor = 1 + weight.float() if zero_centred else weight.to(x.dtype).float()
    shift = None if bias is None else bias.to(x.dtype).float()
    if x.is_cuda:
        return _Norm.apply(x, factor, shift, epsilon)
    y = normalized(x.float(), epsilon, centred=bias is not None) * factor
    return (y if shift is None else y + shift).to(x.dtype)


def normalized(x: Tensor, epsilon: float, centred: bool) -> Tensor:
    """Return float32 x [..., width] divided by its root mean square, after subtracting its mean if `centred`."""
    width = x.shape[-1]
    if centred:
        x = x - (sum_by_halves(x) / width)[..., None]
    return x * torch.rsqrt(sum_by_halves(x.square()) / width + epsilon)[..., None]


def sum_squares(x: Tensor, ranks: int = 1) -> Tensor:
    """Return the sum of squares over the last dimension, [..., 1], computed as a sum over equal chunks.

    The chunks' sums are added by a binary tree of neighbours. If `ranks` ranks share the dimension, this rank's sum is
    a subtree of the sum on one device; parallel/tensor/ordered_reduce.py adds the ranks' sums.
    """
    parts = x.square().unflatten(-1, (local_parts(x.shape[-1], ranks), -1))
    return sum_by_pairs(sum_by_halves(parts).movedim(-1, 0))[..., None]


class _Norm(torch.autograd.Function):
    """A norm with Triton kernels."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: Tensor, shift: Tensor | None, epsilon: float) -> Tensor:
        y, stats = row_norm(x, factor, shift, epsilon)
        ctx.save_for_backward(x, factor, stats)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, factor, stats = ctx.saved_tensors
        if kernels.MIN_WIDTH <= x.shape[-1] <= kernels.MAX_WIDTH:
            rows, grads = x.flatten(0, -2), grad.flatten(0, -2)
            grad_x, _, sums = torch.ops.megalith.norm_backward(
                grads, rows, stats, None, factor, None, None, 0.0, False
            )
            return grad_x.view_as(x), sums[0], sums[1] if len(sums) > 1 else None, None
        wide, grad = x.float(), grad.float()
        scale, *means = stats.view(-1, *x.shape[:-1], 1)
        unit = (wide - means[0] if means else wide) * scale
        by_unit = grad * factor
        grad_x = by_unit - unit * (by_unit * unit).mean(-1, keepdim=True)
        if means:
            grad_x = grad_x - by_unit.mean(-1, keepdim=True)
        grad_factor = (grad * unit).flatten(0, -2).sum(0)
        grad_shift = grad.flatten(0, -2).sum(0) if means else None
        return (grad_x * scale).to(x.dtype), grad_factor, grad_shift, None
