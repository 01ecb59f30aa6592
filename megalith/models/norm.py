"""LayerNorm and RMSNorm, and the residual addition with which they are fused. ops/fused_norm.py has the formulas."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalith.config import ModelConfig
from megalith.local_shards import local
from megalith.models.identity import identity
from megalith.models.runnable import Runnable, runnable
from megalith.ops import fused_norm
from megalith.ops.dropout import Mask


class Norm(Runnable):
    """LayerNorm or RMSNorm, selected by `normalization`, over `width` features. `function` is a seam of batch
    invariance.
    """

    def __init__(self, config: ModelConfig, width: int, device: torch.device | None = None):
        super().__init__()
        self.epsilon = config.layernorm_epsilon
        self.zero_centred = config.layernorm_zero_centered_gamma or not config.add_norm_weight
        self.function = fused_norm.norm
        self.weight = nn.Parameter(torch.empty(width, device=device)) if config.add_norm_weight else None
        if self.weight is None:  # a factor of 1 + 0: buffers start at 0
            self.register_buffer("no_weight", torch.zeros(width, device=device), persistent=False)
        centred = config.normalization == "LayerNorm"
        self.bias = (
            nn.Parameter(torch.empty(width, device=device)) if centred and config.add_norm_bias else None
        )
        if centred and self.bias is None:
            self.register_buffer("no_bias", torch.zeros(width, device=device), persistent=False)

    @runnable
    def forward(self, x: Tensor) -> Tensor:  # [..., width]
        return self.function(x, *self._formula())

    @runnable
    def add_norm(self, x: Tensor, y: Tensor | None, dropout: Mask | None) -> tuple[Tensor, Tensor]:
        """Return the residual stream x + dropout(y) [..., width], and its norm."""
        if self.function is not fused_norm.norm:
            x = fused_norm.residual_add(x, y, dropout)
            return x, self.function(x, *self._formula())
        return fused_norm.add_norm(x, y, dropout, *self._formula())

    def _formula(self) -> tuple[Tensor, Tensor | None, float, bool]:
        weight = self.no_weight if self.weight is None else local(self.weight)
        bias = self._buffers.get("no_bias") if self.bias is None else local(self.bias)
        return weight, bias, self.epsilon, self.zero_centred


class RootMeanSquare(nn.Module):
    """RMSNorm without a weight, computed in fp32. Llama 4's qk_l2_norm applies it to each head."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.epsilon = config.layernorm_epsilon

    def forward(self, x: Tensor) -> Tensor:  # [..., head_dim]
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)).to(x.dtype)


def norm_or_identity(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def add_norm(
    norm: Norm | None, x: Tensor, y: Tensor | None = None, dropout: Mask | None = None
) -> tuple[Tensor, Tensor]:
    """Return the residual stream x + dropout(y), and its norm, or the stream again if there is no norm."""
    if norm is not None:
        return norm.add_norm(x, y, dropout)
    x = fused_norm.residual_add(x, y, dropout)
    return x, x


def branch_output(y: Tensor, norm: Norm | None, multiplier: float) -> Tensor:
    """Apply the norm and the residual multiplier to the output y [batch, seq, hidden] of a mixer or MLP."""
    y = norm_or_identity(norm, y)
    return y if multiplier == 1 else y * multiplier


class Residual(NamedTuple):
    """A residual stream and a mixer or MLP output that is still to be added to it."""

    stream: Tensor  # [batch, seq, hidden]
    norm: Norm | None  # of the branch's output
    multiplier: float
    dropout: Mask | None

    def add(self, y: Tensor) -> Tensor:
        """Return the stream plus y [batch, seq, hidden]."""
        return fused_norm.residual_add(
            self.stream, branch_output(y, self.norm, self.multiplier), self.dropout
        )


class HeadsNorm(Norm):
    """RMSNorm over all heads together (OLMo 2). `total` is a seam: tensor parallelism sums over all ranks' heads."""

    def __init__(self, config: ModelConfig, heads: int, device: torch.device | None = None):
        super().__init__(config, heads * config.head_dim, device)
        self.width = heads * config.head_dim
        self.total = identity

    def forward(self, x: Tensor) -> Tensor:  # [batch, seq, heads, head_dim]
        heads = x.flatten(2).float()
        squares = self.total(heads.square().sum(-1, keepdim=True))  # [batch, seq, 1]
        weight = local(self.weight).float() + self.zero_centred
        return (heads * torch.rsqrt(squares / self.width + self.epsilon) * weight).to(x.dtype).view_as(x)


class HeadNorms(nn.Module):
    """LayerNorm without a bias, or RMSNorm, per head with separate weights, computed in fp32 (Command-R+)."""

    def __init__(self, config: ModelConfig, heads: int, device: torch.device | None = None):
        super().__init__()
        self.epsilon = config.layernorm_epsilon
        self.centred = config.normalization == "LayerNorm"
        self.zero_centred = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(heads, config.head_dim, device=device))

    def forward(self, x: Tensor) -> Tensor:  # [batch, seq, heads, head_dim]
        wide = x.float()
        if self.centred:
            wide = wide - wide.mean(-1, keepdim=True)
        weight = local(self.weight).float() + self.zero_centred
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon) * weight).to(x.dtype)
