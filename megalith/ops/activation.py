"""Activation functions of MLPs.

The input is a linear layer's output including its bias. Each function also takes the bias as an argument, to compute
its gradient.

GELU's tanh approximation (Hendrycks and Gimpel 2016) is computed as a sigmoid: (1 + tanh u) / 2 = sigmoid(2u). In a
compiled layer on an H200, this takes 80 % of the time of tanh, because the kernel becomes memory-bound.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap

import torch
from torch import Tensor
from torch.nn import functional as F

from megalith.ops import kernels
from megalith.ops.compiled import as_one_kernel
from megalith.ops.gemm import add_bias_gradient
from megalith.ops.kernels import CUBIC, SLOPE


def gelu_tanh(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))) in x's dtype, computed in fp32.

    `bias`, float32 [width], is already included in x [..., width]. It is passed only because its gradient is computed
    here.
    """
    if bias is not None and bias.requires_grad and kernels.fuses_backward(x):
        return _BiasedGelu.apply(x, bias)  # one kernel computes the gradient of x and its sum over tokens
    x = add_bias_gradient(x, bias)
    if x.is_cuda and torch.compiler.is_compiling():
        return _by_sigmoid(x)
    return F.gelu(x, approximate="tanh")


def _with_bias(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def activation(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return function(add_bias_gradient(x, bias))

    return activation


ACTIVATIONS = {
    "gelu": _with_bias(F.gelu),
    "gelu_tanh": gelu_tanh,
    "quick_gelu": _with_bias(lambda x: x * torch.sigmoid(1.702 * x)),  # Hendrycks and Gimpel 2016
    "relu": _with_bias(F.relu),
    "squared_relu": _with_bias(lambda x: F.relu(x).square()),  # So et al. 2021
    "silu": _with_bias(F.silu),
}


def gated_activation(
    activation: Callable[[Tensor], Tensor],
    x: Tensor,
    bias: Tensor | None = None,
    *,
    clamp: float | None = None,
    offset: float = 0.0,
    factor: float = 1.0,
) -> Tensor:
    """Return activation(factor · gate) · (up + offset). Gates and ups are clamped to `clamp` first (gpt-oss).

    Gates and ups alternate in x [..., 2 · ffn]. `bias` is handled as in `gelu_tanh`.
    """
    x = add_bias_gradient(x, bias)
    # A batch-invariant activation wraps the plain one.
    is_swiglu = unwrap(activation) is ACTIVATIONS["silu"] and clamp is None and not offset and factor == 1
    if is_swiglu and kernels.runs_alone(x):
        return _Swiglu.apply(x.flatten(0, -2), None, None).unflatten(0, x.shape[:-1])
    gate, up = x.unflatten(-1, (-1, 2)).movedim(-1, 0).contiguous()  # [..., ffn] each
    if factor != 1:
        gate = gate * factor
    return _glu(activation, gate, up, clamp, offset)


def _glu(
    activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor, clamp: float | None, offset: float
) -> Tensor:
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return activation(gate) * (up + offset if offset else up)


def weighted_activation(
    x: Tensor,
    weights: Tensor,
    activation: Callable[[Tensor], Tensor],
    gated: bool,
    fusion: bool,
    clamp: float | None = None,
    offset: float = 0.0,
    end: Tensor | None = None,
) -> Tensor:
    """Apply the experts' activation to the rows of fc1's output, and multiply each row by its weight.

    Args:
        x: [rows, expert size], or [rows, 2 · expert size] with gates and ups alternating.
        weights: weight of each row, float32 [rows, 1].
        activation: activation function.
        gated: x contains gates.
        fusion: on a GPU, use a single kernel also outside of compiled layers.
        clamp: limit of gates and ups, as in `gated_activation`.
        offset: added to ups, as in `gated_activation`.
        end: int32 [1]; rows at or after this index are undefined in inputs, outputs and gradients.

    Returns:
        [rows, expert size].
    """
    is_swiglu = gated and activation is ACTIVATIONS["silu"] and clamp is None and not offset
    if fusion and is_swiglu and kernels.AVAILABLE and x.is_cuda:
        return _Swiglu.apply(x, weights, end)
    args = x, weights, activation, gated, clamp, offset
    if not fusion:
        return _weighted(*args)
    return as_one_kernel(_weighted, *args, **(dict(rows_vary=True) if end is None else dict(sizes_vary=True)))


def _weighted(
    x: Tensor,
    weights: Tensor,
    activation: Callable[[Tensor], Tensor],
    gated: bool,
    clamp: float | None,
    offset: float,
) -> Tensor:
    if gated:
        gate, up = x.unflatten(-1, (-1, 2)).unbind(-1)
        return _glu(activation, gate, up, clamp, offset) * weights.to(x.dtype)
    return activation(x) * weights.to(x.dtype)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weights: Tensor | None, end: Tensor | None) -> Tensor:
        x, weights = x.contiguous(), None if weights is None else weights.contiguous()
        ctx.save_for_backward(x, weights, end)
        return kernels.swiglu(x, weights, end)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return *kernels.swiglu_backward(grad.contiguous(), *ctx.saved_tensors), None


def _by_sigmoid(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.sigmoid(SLOPE * (wide + CUBIC * wide**3))).to(x.dtype)


class _BiasedGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        # A view, because compiled code of torch 2.11 loses the gradient of a result that is also an intermediate, such
        # as the result of a cast to the same dtype.
        return _by_sigmoid(x).view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (x,) = ctx.saved_tensors
        grad_x, grad_bias = torch.ops.megalith.gelu_backward(grad.flatten(0, -2), x.flatten(0, -2))
        return grad_x.view_as(x), grad_bias
