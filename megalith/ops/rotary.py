"""Rotation of pairs of a head's dimensions by tables of cosines and sines."""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.ops import kernels


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Return x with pair j (a, b) replaced by (a · cos_j − b · sin_j, b · cos_j + a · sin_j), computed in fp32.

    Args:
        x: [batch, seq, heads, head_dim].
        cos, sin: float32 [batch or 1, seq, 1, pairs], without a gradient. Dimensions after the last pair are unchanged.
        interleaved: pair j is (x_2j, x_2j+1); otherwise it is (x_j, x_{j + pairs}).
    """
    if kernels.runs_alone(x):
        return _Rotate.apply(x, cos, sin, interleaved)
    size = 2 * cos.shape[-1]
    part = x[..., :size].float()
    first, second = part.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else part.chunk(2, dim=-1)
    rotated = first * cos - second * sin, second * cos + first * sin
    rotated = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    rotated = rotated.to(x.dtype)
    return rotated if size == x.shape[-1] else torch.cat([rotated, x[..., size:]], dim=-1)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        x, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, cos, sin))
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return kernels.rotate_pairs(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        return (
            kernels.rotate_pairs(grad, *ctx.saved_tensors, ctx.interleaved, backward=True),
            None,
            None,
            None,
        )
