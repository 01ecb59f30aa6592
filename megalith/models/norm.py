"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019) over the last dimension, statistics in fp32."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm

from megalith.comm.collectives import local
from megalith.config import ModelConfig
from megalith.ops.dropout import Mask, counter_dropout
from megalith.ops.norm import fuses_norm, norm_beside


class Norm(nn.Module):
    """The norm that `normalization` names, over `width` features.

    With `layernorm_zero_centered_gamma` it multiplies by 1 + weight, in fp32: in the compute dtype the sum would lose
    the weight's small steps.
    """

    def __init__(self, config: ModelConfig, width: int, device: torch.device | None = None):
        super().__init__()
        self.epsilon = config.layernorm_epsilon
        self.zero_centred = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(width, device=device))
        centred = config.normalization == "LayerNorm"
        self.bias = nn.Parameter(torch.empty(width, device=device)) if centred else None

    def forward(self, x: Tensor) -> Tensor:  # [..., width]
        return self._normed(x)

    def beside(
        self,
        x: Tensor,  # [..., width]
        y: Tensor | None = None,
        mask: Mask | None = None,
        before: Tensor | None = None,
        behind: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x + y, for the residual stream, and that normed, in a form that takes few kernels: see `norm_beside`."""
        if not fuses_norm(x):
            x = added(x, y, mask)
            return x, self._normed(x)
        bias = None if self.bias is None else local(self.bias)
        weight = local(self.weight) + 1 if self.zero_centred else local(self.weight)
        return norm_beside(x, y, mask, weight, bias, self.epsilon, not self.zero_centred, before, behind)

    def _normed(self, x: Tensor) -> Tensor:
        if self.zero_centred:
            return self._normalize(x.float(), 1 + local(self.weight).float()).to(x.dtype)
        return self._normalize(x, local(self.weight).to(x.dtype))

    def _normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(x, (x.shape[-1],), weight, self.epsilon)
        return layer_norm(x, (x.shape[-1],), weight, local(self.bias).to(x.dtype), self.epsilon)


def added(x: Tensor, y: Tensor | None, mask: Mask | None) -> Tensor:
    """x + y, with `mask` after dropout of y; x where there is no y."""
    if y is None:
        return x
    return x + (y if mask is None else counter_dropout(y, *mask))


def _whole(x: Tensor) -> Tensor:
    return x


class HeadsNorm(Norm):
    """RMSNorm over all heads together (OLMo 2). `total` is a seam: tensor parallelism sums over the ranks' heads."""

    def __init__(self, config: ModelConfig, heads: int, device: torch.device | None = None):
        super().__init__(config, heads * config.head_dim, device)
        self.width = heads * config.head_dim
        self.total = _whole

    def forward(self, x: Tensor) -> Tensor:  # [batch, seq, heads, head_dim]
        heads = x.flatten(2).float()
        squares = self.total(heads.square().sum(-1, keepdim=True))  # [batch, seq, 1]
        weight = local(self.weight).float() + self.zero_centred
        return (heads * torch.rsqrt(squares / self.width + self.epsilon) * weight).to(x.dtype).view_as(x)
