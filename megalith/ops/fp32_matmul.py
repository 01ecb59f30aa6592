"""A product of matrices in bf16 with an fp32 result: a router's, whose scores hang on small differences.

A product of two bf16 numbers fits into fp32, so tensor cores, which add up in fp32, lose nothing that a product of the
matrices cast to fp32 keeps, and take a small part of its time. The gradient that comes back is fp32 and does not fit:
it is cut into two bf16 numbers, which together keep 16 of its 24 bits, more than its gradients in bf16 have.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ: x [tokens, in], weight [out, in] of x's dtype → float32 [tokens, out], computed in fp32."""
    if x.dtype == torch.bfloat16:
        return _WideProduct.apply(x, weight)
    return x.float() @ weight.float().T


class _WideProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight.T)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        high = grad.to(x.dtype)
        parts = torch.cat([high, (grad - high.float()).to(x.dtype)], 1)  # [tokens, 2 · out]
        grad_x = _product(parts, torch.cat([weight, weight])).to(x.dtype)
        of_high, of_low = _product(parts.T, x).chunk(2)  # [out, in]
        return grad_x, (of_high + of_low).to(weight.dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a · b in fp32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
