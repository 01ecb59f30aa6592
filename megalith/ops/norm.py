"""A norm beside a residual stream, with the backward pass of both in one kernel.

The gradient of x, from which a norm branches off, is the sum of what comes back through the norm and along the stream.
Made together, the rows are read once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.ops import fused


def fuses_norm(x: Tensor) -> bool:
    """Whether `norm_beside` is to be taken for x [..., width]."""
    return fused.on_gpu(x) and fused.LEAST_WIDTH <= x.shape[-1] <= fused.WIDEST_ROW


def norm_beside(
    x: Tensor,  # [..., width]
    weight: Tensor,  # float32 [width]
    bias: Tensor | None,  # float32 [width]; None: RMSNorm
    epsilon: float,
    rounded: bool,
    before: Tensor | None = None,
    behind: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x as it is, for the residual stream, and x normed: LayerNorm or RMSNorm in fp32, the result in x's type.

    `rounded`: weight and bias are first rounded to x's type. `before` and `behind`, float32 [width], take part in
    nothing here: they are the biases of linears whose results have been added to x, and will be added to the x
    returned, with the bias detached. Their gradients, sums over the tokens, are made here.
    """
    return _NormBeside.apply(x, weight, bias, before, behind, epsilon, rounded)


class _NormBeside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, before, behind, epsilon: float, rounded: bool) -> tuple[Tensor, Tensor]:
        wide, kind = x.float(), x.dtype if rounded else torch.float32
        mean = None
        if bias is None:
            rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
            normed = wide * rstd * weight.to(kind)
        else:
            variance, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
            rstd = torch.rsqrt(variance + epsilon)
            normed = (wide - mean) * rstd * weight.to(kind) + bias.to(kind)
        ctx.save_for_backward(x, weight, rstd, *([] if mean is None else [mean]))
        ctx.rounded, ctx.before, ctx.behind = rounded, before is not None, behind is not None
        return x.view_as(x), normed.to(x.dtype)

    @staticmethod
    def backward(ctx, beside: Tensor, grad: Tensor):
        x, weight, rstd, *mean = ctx.saved_tensors
        centred = len(mean) == 1
        rows = [t.flatten(0, -2) for t in (grad, x, mean[0] if centred else rstd, rstd, beside)]
        grad_x, sums = torch.ops.megalith.norm_backward(
            *rows, weight, centred, ctx.rounded, ctx.before, ctx.behind
        )
        sums = list(sums.unbind())
        grad_weight = sums.pop(0)
        grad_bias = sums.pop(0) if centred else None
        grad_before = sums.pop(0) if ctx.before else None
        grad_behind = sums.pop(0) if ctx.behind else None
        return grad_x.view_as(x), grad_weight, grad_bias, grad_before, grad_behind, None, None
