"""A norm beside a residual stream, whose addition before it and gradients behind it are parts of the same kernels.

    x ──┬─▶ + ──┬────────────▶ stream            The gradient of x, and of y where it was not dropped from, is the sum
    y ──┘       └──▶ norm ───▶ normed            of what comes back through the norm and along the stream.

Made together, each of these tensors is read or written once, forward and backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.ops import kernels as fused
from megalith.ops.dropout import Mask


def fuses_norm(x: Tensor) -> bool:
    """Whether `norm_beside` is to be taken for x [..., width]."""
    return fused.on_gpu(x) and fused.LEAST_WIDTH <= x.shape[-1] <= fused.WIDEST_ROW


def norm_beside(
    x: Tensor,  # [..., width]
    y: Tensor | None,  # the same
    mask: Mask | None,
    weight: Tensor,  # float32 [width]
    bias: Tensor | None,  # float32 [width]; None: RMSNorm
    epsilon: float,
    rounded: bool,
    before: Tensor | None = None,
    behind: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x + y in their type, and that normed: LayerNorm or RMSNorm in fp32, the result in their type.

    y None: x alone. `mask`: y goes through dropout first. `rounded`: weight and bias are first rounded to x's type.
    `before` and `behind`, float32 [width], take part in nothing here: they are the biases of the linear that has given
    y and of the one whose result will be added, with its bias detached, to the sum returned. Their gradients, sums over
    the tokens, are made here.
    """
    probability, rows, columns = (0.0, None, None) if mask is None else mask
    return _NormBeside.apply(x, y, rows, columns, weight, bias, before, behind, probability, epsilon, rounded)


class _NormBeside(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x,
        y,
        rows,
        columns,
        weight,
        bias,
        before,
        behind,
        probability: float,
        epsilon: float,
        rounded: bool,
    ) -> tuple[Tensor, Tensor]:
        flat = [None if t is None else t.flatten(0, -2) for t in (x, y)]
        rows = None if rows is None else rows.flatten()
        stream, normed, stats = torch.ops.megalith.norm_forward(
            *flat, weight, bias, rows, columns, probability, epsilon, rounded
        )
        stream = x.view_as(x) if y is None else stream.view_as(x)
        ctx.save_for_backward(stream, stats, weight, rows, columns)
        ctx.probability, ctx.rounded = probability, rounded
        ctx.adds, ctx.centred = y is not None, bias is not None
        ctx.before, ctx.behind = before is not None, behind is not None
        return stream, normed.view_as(x)

    @staticmethod
    def backward(ctx, beside: Tensor, grad: Tensor):
        stream, stats, weight, rows, columns = ctx.saved_tensors
        grad, x, beside = (t.flatten(0, -2) for t in (grad, stream, beside))
        grad_x, dropped, sums = torch.ops.megalith.norm_backward(
            grad, x, stats, beside, weight, rows, columns,
            ctx.probability, ctx.rounded, ctx.before, ctx.behind,
        )  # fmt: skip
        grad_x = grad_x.view_as(stream)
        grad_y = None
        if ctx.adds:
            grad_y = grad_x if rows is None else dropped.view_as(stream)
        sums = list(sums.unbind())
        grad_weight = sums.pop(0)
        grad_bias = sums.pop(0) if ctx.centred else None
        grad_before = sums.pop(0) if ctx.before else None
        grad_behind = sums.pop(0) if ctx.behind else None
        return grad_x, grad_y, None, None, grad_weight, grad_bias, grad_before, grad_behind, None, None, None
