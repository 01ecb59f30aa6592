"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019) over the last dimension, with fp32 statistics; alone
or fused with a residual addition.

     x ──┬─▶ + ──┬────────────▶ stream            The gradient of x, and of y without dropout, is the sum of the
     y ──┘       └──▶ norm ───▶ normed            gradients through the norm and along the stream.

In compiled code on a GPU, addition, dropout and norm are one kernel, and so are their gradients: each of these tensors
is read or written once in each direction.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from megalith.ops import kernels
from megalith.ops.dropout import Mask, counter_dropout


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, zero_centred: bool) -> Tensor:
    """Normalize x [..., width] in its dtype: LayerNorm with a bias float32 [width], RMSNorm without.

    With `zero_centred` the factor is 1 + weight, in fp32, because the sum would lose small changes of the weight in x's
    dtype.
    """
    if zero_centred:
        return _normalized(x.float(), 1 + weight.float(), bias, epsilon).to(x.dtype)
    return _normalized(x, weight.to(x.dtype), bias, epsilon)


def residual_add(x: Tensor, y: Tensor | None, dropout: Mask | None) -> Tensor:
    """Return x + y, with `dropout` applied to y; x if there is no y."""
    if y is None:
        return x
    return x + (y if dropout is None else counter_dropout(y, *dropout))


def add_norm(
    x: Tensor,  # [..., width]
    y: Tensor | None,  # the same
    dropout: Mask | None,
    weight: Tensor,  # float32 [width]
    bias: Tensor | None,  # float32 [width]; None: RMSNorm
    epsilon: float,
    zero_centred: bool,
) -> tuple[Tensor, Tensor]:
    """Return x + y, as from `residual_add`, and its norm, as from `norm`, in their dtypes."""
    if not (kernels.fuses_backward(x) and kernels.MIN_WIDTH <= x.shape[-1] <= kernels.MAX_WIDTH):
        x = residual_add(x, y, dropout)
        return x, norm(x, weight, bias, epsilon, zero_centred)
    probability, rows, columns = (0.0, None, None) if dropout is None else dropout
    weight = weight + 1 if zero_centred else weight
    return _AddNorm.apply(x, y, rows, columns, weight, bias, probability, epsilon, not zero_centred)


def _normalized(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    if bias is None:
        return rms_norm(x, (x.shape[-1],), weight, epsilon)
    return layer_norm(x, (x.shape[-1],), weight, bias.to(x.dtype), epsilon)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, y, rows, columns, weight, bias, probability: float, epsilon: float, rounded: bool
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
        return stream, normed.view_as(x)

    @staticmethod
    def backward(ctx, stream_grad: Tensor, grad: Tensor):
        stream, stats, weight, rows, columns = ctx.saved_tensors
        grad, x, stream_grad = (t.flatten(0, -2) for t in (grad, stream, stream_grad))
        grad_x, dropped, sums = torch.ops.megalith.norm_backward(
            grad, x, stats, stream_grad, weight, rows, columns, ctx.probability, ctx.rounded
        )
        grad_x = grad_x.view_as(stream)
        grad_y = None
        if ctx.adds:
            grad_y = grad_x if rows is None else dropped.view_as(stream)
        grad_bias = sums[1] if ctx.centred else None
        return grad_x, grad_y, None, None, sums[0], grad_bias, None, None, None
