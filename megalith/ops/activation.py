"""GELU by its tanh approximation (Hendrycks and Gimpel 2016), in the form that a GPU computes fastest."""

from __future__ import annotations

from math import pi, sqrt

import torch
from torch import Tensor
from torch.nn import functional as F

SLOPE, CUBIC = 2 * sqrt(2 / pi), 0.044715


def gelu_tanh(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))) in x's dtype, computed in fp32.

    `bias` float32 [width], which x [..., width] has had added without its gradient, gets its gradient here: one kernel
    then makes the gradient of x and sums it over the tokens.

    (1 + tanh u) / 2 is the sigmoid of 2u, which takes an H200 four fifths of the time: there the kernel is then bound
    by memory. It needs a compiled layer to be one kernel, so only a GPU's takes this way.
    """
    if bias is not None:
        return _BiasedGelu.apply(x, bias)
    if x.is_cuda and torch.compiler.is_compiling():
        return _by_sigmoid(x)
    return F.gelu(x, approximate="tanh")


def _by_sigmoid(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.sigmoid(SLOPE * (wide + CUBIC * wide**3))).to(x.dtype)


class _BiasedGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        # A view, for torch 2.11: compiled, it loses the gradient of a result that is an intermediate's tensor too, as
        # after a cast to the type that it has.
        return _by_sigmoid(x).view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (x,) = ctx.saved_tensors
        grad_x, grad_bias = torch.ops.megalith.gelu_backward(grad.flatten(0, -2), x.flatten(0, -2))
        return grad_x.view_as(x), grad_bias
