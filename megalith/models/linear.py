"""A linear layer whose matmul can be replaced from outside: the seam of tensor parallelism and of FP8.

It may have an adapter (lora.py), whose result is added to its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalith.comm.collectives import local
from megalith.models.pass_context import Context
from megalith.ops import kernels as fused
from megalith.ops.gemm import linear


class Linear(nn.Module):
    """y = x · weightᵀ + bias, with weight [out, in] kept in fp32 and cast to x's dtype where it is used."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, device: torch.device | None = None
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device))
        self.bias = nn.Parameter(torch.empty(out_features, device=device)) if bias else None
        self.matmul = linear
        self.bias_by_column = True  # each entry of the bias is added to one column of y, in their order
        self.adapter: nn.Module | None = None

    def fuses_bias(self, x: Tensor) -> bool:
        """Whether the gradient of the bias is to be made by the kernel that makes the gradient of this layer's y."""
        learns = self.bias is not None and self.bias.requires_grad
        return learns and self.bias_by_column and fused.on_gpu(x)

    def forward(
        self, x: Tensor, context: Context | None = None, bias_learns: bool = True
    ) -> Tensor:  # [..., in] -> [..., out]
        """`bias_learns` False: the bias gets its gradient elsewhere, by the kernel that makes the gradient of y."""
        weight = local(self.weight).to(x.dtype)
        bias = None if self.bias is None else local(self.bias).to(x.dtype)
        if bias is not None and not bias_learns:
            bias = bias.detach()
        y = self.matmul(x, weight, bias)
        return y if self.adapter is None else y + self.adapter(x, context)
