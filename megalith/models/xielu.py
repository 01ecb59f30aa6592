"""xIELU (Huang and Schlag 2024), an activation with two learned slopes per layer.

    αₚ x² + β x                      for x > 0
    αₙ (eˣ − 1 − x) + β x            otherwise

with αₚ = softplus(weight[0]), αₙ = β + softplus(weight[1]) and β = 0.5.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megalith.local_shards import local
from megalith.ops.gemm import add_bias_gradient

BETA = 0.5
EPSILON = -1e-6  # upper bound of the exponent, so that eˣ − 1 does not vanish
INITIAL = tuple(math.log(math.expm1(alpha)) for alpha in (0.8, 0.8 - BETA))  # αₚ = αₙ = 0.8


class XIELU(nn.Module):
    """The activation of one MLP, weight float32 [2]."""

    def __init__(self, device: torch.device | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, device=device))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the activation of x [..., ffn] in its dtype, computed in fp32.

        `bias` is handled as in `ops.activation.gelu_tanh`.
        """
        x = add_bias_gradient(x, bias)
        slopes, wide = F.softplus(local(self.weight).float()), x.float()
        positive, negative = slopes[0], BETA + slopes[1]
        curved = torch.where(
            wide > 0, positive * wide * wide, (torch.expm1(wide.clamp(max=EPSILON)) - wide) * negative
        )
        return (curved + BETA * wide).to(x.dtype)
