"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019) over the last dimension, statistics in fp32."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm

from megalith.comm import local
from megalith.config import ModelConfig


class Norm(nn.Module):
    """The norm that `normalization` names, over `width` features."""

    def __init__(self, config: ModelConfig, width: int, device: torch.device | None = None):
        super().__init__()
        self.epsilon = config.layernorm_epsilon
        self.weight = nn.Parameter(torch.empty(width, device=device))
        centred = config.normalization == "LayerNorm"
        self.bias = nn.Parameter(torch.empty(width, device=device)) if centred else None

    def forward(self, x: Tensor) -> Tensor:  # [..., width]
        weight = local(self.weight).to(x.dtype)
        if self.bias is None:
            return rms_norm(x, (x.shape[-1],), weight, self.epsilon)
        return layer_norm(x, (x.shape[-1],), weight, local(self.bias).to(x.dtype), self.epsilon)
