"""The three matmuls of a linear layer as one object.

     forward   y = x · weightᵀ + bias        x [tokens, in], weight [out, in], bias [out]
     dgrad     grad · weight                 gradient of x; grad [tokens, out] is that of y
     wgrad     gradᵀ · x                     gradient of weight

Linear layers are composed around it: plain ones here, column- and row-parallel ones in parallel/tensor/, and those with
deferred wgrads for zero-bubble schedules in parallel/pipeline/deferred_wgrad.py. Subclasses of Gemm use other
arithmetic, such as FP8.

Split-K: wgrad sums over all tokens. A GPU computes it in tiles, one per SM at a time. With 1.5 times as many tiles as
SMs, half of the SMs are idle in the second wave. On an H200 the two wgrads of GPT-2-large's MLP (1280 × 5120, 32,768
tokens) reach 573 TFLOP/s, and 755 to 790 if the tokens are split into four matmuls that run as one batch and are added
in fp32. Their tensor-parallel shards, whose tiles fill three quarters of the SMs, reach 602 and, in a step, 689.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from megalith.compat.dynamo import mark_constant

TILES = ((128, 256), (256, 128), (320, 128), (192, 192))  # tile sizes of cuBLAS on Hopper
PARTS = 4
CUBLAS_SPLITS = 2 / 3  # fraction of SMs; cuBLAS itself splits matmuls with fewer tiles
WELL_FILLED = 0.8  # fraction of SMs above which splitting gains nothing
MIN_TOKENS = 8192


@dataclass(frozen=True)
class DeferredWgrad:
    """A deferred wgrad: its computation, and the autograd edge to the parameter."""

    compute: Callable[[], Tensor]
    weight: GradientEdge


Operand = tuple[Tensor, ...]
"""A matrix as a Gemm receives it: the tensor, or FP8 data and its scales. Dimension 0 is tokens. A tensor without
dimensions (a scale of the whole matrix) is the same for every shard."""


class Gemm:
    """The three matmuls of a linear layer (forward, dgrad, wgrad) in the dtype of their operands.

    Subclasses use other arithmetic, such as FP8.
    """

    deferred: list[DeferredWgrad] | None = None
    """List of deferred wgrads. None: the backward pass computes them."""

    def inputs(self, x: Tensor, saves: bool, sharded: bool = False) -> tuple[Operand, Operand]:
        """Return x [tokens, in] as (operand for `forward` and all-gathers, operand to save for `wgrad`).

        The second one is empty unless `saves`. `sharded`: the second one will be all-gathered too, in the backward
        pass.
        """
        return (x,), (x,) if saves else ()

    def weights(self, weight: Tensor, trains: bool) -> tuple[Operand, Operand]:
        """Return the weight as (operand for `forward`, operand to save for `dgrad`).

        `trains`: there is a backward pass; otherwise the second one is not used.
        """
        return (weight,), (weight,)

    def gradients(self, grad: Tensor, has_wgrad: bool) -> tuple[Operand, Operand]:
        """Return the gradient of y [tokens, out] as (operand for `dgrad`, operand for `wgrad`).

        The second one is empty unless `has_wgrad`.
        """
        return (grad,), (grad,) if has_wgrad else ()

    def forward(self, x: Operand, weight: Operand, bias: Tensor | None = None) -> Tensor:
        return F.linear(x[0], weight[0], bias)  # [tokens, out]

    def dgrad(self, grad: Operand, weight: Operand) -> Tensor:
        return grad[0] @ weight[0]  # [tokens, in]

    def wgrad(self, grad: Operand, x: Operand) -> Tensor:
        """Return the weight's gradient [out, in], from grad as returned by `gradients` and x as saved by `inputs`."""
        (grad,), (x,) = grad, x
        return wgrad_in_parts(grad, x, wgrad_parts(x, (grad.shape[-1], x.shape[-1])))

    def with_deferred_wgrads(self, wgrads: list[DeferredWgrad]) -> Gemm:
        """Return the same Gemm with wgrads deferred to this list."""
        gemm = copy.copy(self)
        gemm.deferred = wgrads
        return gemm

    def edge(self, weight: Tensor) -> GradientEdge | None:
        """Return the autograd edge of the weight for a deferred wgrad. None if wgrads are not deferred."""
        return get_gradient_edge(weight) if self.deferred is not None and has_wgrad(weight) else None


GEMM = Gemm()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, gemm: Gemm = GEMM) -> Tensor:
    """Return x · weightᵀ + bias for x [..., in], weight [out, in] and bias [out] of one dtype: [..., out].

    The bias gets its gradient from `add_bias_gradient`.
    """
    if gemm is GEMM and not torch.is_grad_enabled():
        return F.linear(x, weight, bias)  # saves the host's work for a backward pass
    if bias is not None:
        bias = bias.detach()
    edge, saves, trains = gemm.edge(weight), has_wgrad(weight), torch.is_grad_enabled()
    y = _Linear.apply(x.flatten(0, -2), weight, bias, gemm, edge, saves, trains)
    return y.unflatten(0, x.shape[:-1])


def has_wgrad(weight: Tensor) -> bool:
    """Return True if a matmul by `weight` needs a wgrad and so saves its input.

    Call it before the autograd function's `apply`; gradients are disabled inside its `forward`.
    """
    return torch.is_grad_enabled() and weight.requires_grad


def add_bias_gradient(y: Tensor, bias: Tensor | None) -> Tensor:
    """Return y [..., out] unchanged. Its gradient, summed over tokens, becomes the gradient of `bias` [out].

    y already includes the bias, which was added without a gradient.
    """
    if bias is None or not bias.requires_grad:
        return y
    return _BiasGradient.apply(y, bias)


def wgrad_in_parts(grad: Tensor, x: Tensor, parts: int = 1) -> Tensor:
    """Return gradᵀ · x, [out, in], for grad [tokens, out] and x [tokens, in], all of one dtype.

    The tokens are split into `parts` parts, whose products are added.
    """
    if parts == 1:
        return grad.T @ x
    grad, x = (t.unflatten(0, (parts, -1)) for t in (grad, x))  # [parts, tokens / parts, ...]
    return torch.bmm(grad.mT, x).sum(0, dtype=torch.float32).to(x.dtype)


def wgrad_parts(x: Tensor, weight_shape: tuple[int, int]) -> int:
    """Return the best number of chunks for the wgrad of a weight of this shape with input x [..., in]."""
    tokens = x.numel() // x.shape[-1]
    if not x.is_cuda or x.dtype == torch.float32 or tokens < MIN_TOKENS or tokens % PARTS:
        return 1
    processors = _processors(x.device.index)
    rows, columns = weight_shape
    tiles = [ceil(rows / height) * ceil(columns / width) for height, width in TILES]
    if max(tiles) <= CUBLAS_SPLITS * processors:
        return 1
    return (
        1 if max(count / (ceil(count / processors) * processors) for count in tiles) > WELL_FILLED else PARTS
    )


@mark_constant
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, gemm: Gemm, edge, saves: bool, trains: bool
    ) -> Tensor:
        operand, saved = gemm.inputs(x, saves)  # both [tokens, in]
        weight, saved_weight = gemm.weights(weight, trains)
        ctx.save_for_backward(*saved_weight, *saved)
        ctx.gemm, ctx.edge, ctx.parts = gemm, edge, len(saved_weight)
        return gemm.forward(operand, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):
        saved = ctx.saved_tensors  # read once: a recomputed layer provides them once
        weight, x = saved[: ctx.parts], saved[ctx.parts :]
        gemm, grad_x, grad_weight = ctx.gemm, None, None
        dgrad_operand, grad = gemm.gradients(grad, ctx.needs_input_grad[1])
        if ctx.needs_input_grad[0]:
            grad_x = gemm.dgrad(dgrad_operand, weight)
        if ctx.edge is not None:
            gemm.deferred.append(DeferredWgrad(partial(gemm.wgrad, grad, x), ctx.edge))
        elif ctx.needs_input_grad[1]:
            grad_weight = gemm.wgrad(grad, x)
        return grad_x, grad_weight, None, None, None, None, None


class _BiasGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, bias: Tensor) -> Tensor:
        ctx.dtype = bias.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # Rounded as if the bias had been gathered in the compute dtype.
        total = grad.flatten(0, -2).sum(0, dtype=torch.float32).to(grad.dtype)
        return grad, total.to(ctx.dtype)


def float32_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Return x · weightᵀ, computed in fp32: float32 [tokens, out].

    x is [tokens, in] and weight [out, in], of one dtype. Routers use it, because their scores depend on small
    differences.

    Products of two bf16 numbers are exact in fp32. So tensor cores, which accumulate in fp32, are as exact as fp32
    matmuls and take a fraction of their time. The fp32 gradient does not fit into bf16: it is split into two bf16
    numbers, which together keep 16 of its 24 bits, more than the resulting bf16 gradients have.
    """
    if x.dtype == torch.bfloat16:
        return _Float32Matmul.apply(x, weight)
    return x.float() @ weight.float().T


class _Float32Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _matmul_to_fp32(x, weight.T)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        high = grad.to(x.dtype)
        parts = torch.cat([high, (grad - high.float()).to(x.dtype)], 1)  # [tokens, 2 · out]
        grad_x = _matmul_to_fp32(parts, torch.cat([weight, weight])).to(x.dtype)
        high_grad, low_grad = _matmul_to_fp32(parts.T, x).chunk(2)  # [out, in]
        return grad_x, (high_grad + low_grad).to(weight.dtype)


def _matmul_to_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return a · b in fp32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
