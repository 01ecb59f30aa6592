"""A linear layer's matmul, with the product that gives its weight's gradient cut where a GPU would stand half idle.

The gradient of a weight [out, in] is a product over all tokens. A GPU computes it in tiles, one per multiprocessor at a
time. When the tiles fill the multiprocessors one and a half times, the second round leaves half of them without work:
on an H200 the two of GPT-2-large's MLP (1280 × 5120, 32,768 tokens) reach 573 TFLOP/s, and 755 to 790 when the tokens
are cut into four products that run as one batch and are summed in fp32. So do those of its halves under tensor
parallelism, whose tiles fill the multiprocessors to three quarters: 602 and, in a step, 689.
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor
from torch.nn import functional as F

TILES = ((128, 256), (256, 128), (320, 128), (192, 192))  # of a product, as cuBLAS cuts it on Hopper
PARTS = 4
HELD = 2 / 3  # of the multiprocessors: where tiles take no more, cuBLAS cuts a product itself
FILLED = 0.8  # from here on cutting gains nothing
LEAST_TOKENS = 8192


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias: x [..., in], weight [out, in], bias [out], all of one dtype → [..., out]."""
    parts = weight_gradient_parts(x, weight.shape)
    if parts == 1:
        return F.linear(x, weight, bias)
    return _CutLinear.apply(x.flatten(0, -2), weight, bias, parts).unflatten(0, x.shape[:-1])


def weight_gradient(grad: Tensor, x: Tensor, parts: int = 1) -> Tensor:
    """gradᵀ · x: grad [tokens, out], x [tokens, in] → [out, in] in their dtype, summed over `parts` of the tokens."""
    if parts == 1:
        return grad.T @ x
    grad, x = (t.unflatten(0, (parts, -1)) for t in (grad, x))  # [parts, tokens / parts, ...]
    return torch.bmm(grad.mT, x).sum(0, dtype=torch.float32).to(x.dtype)


def weight_gradient_parts(x: Tensor, weight_shape: tuple[int, int]) -> int:
    """Into how many products `weight_gradient` is best cut for the input x [..., in] of such a weight."""
    tokens = x.numel() // x.shape[-1]
    if not x.is_cuda or x.dtype == torch.float32 or tokens < LEAST_TOKENS or tokens % PARTS:
        return 1
    processors = _processors(x.device.index)
    rows, columns = weight_shape
    tiles = [ceil(rows / height) * ceil(columns / width) for height, width in TILES]
    if max(tiles) <= HELD * processors:
        return 1
    return 1 if max(count / (ceil(count / processors) * processors) for count in tiles) > FILLED else PARTS


@torch.compiler.assume_constant_result
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class _CutLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, parts: int) -> Tensor:  # x [tokens, in]
        ctx.save_for_backward(x, weight)
        ctx.parts, ctx.has_bias = parts, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        grad_bias = grad.sum(0) if ctx.has_bias else None
        grad_weight = weight_gradient(grad, x, ctx.parts) if ctx.needs_input_grad[1] else None
        return grad @ weight, grad_weight, grad_bias, None
