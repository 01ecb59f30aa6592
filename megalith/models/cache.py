"""Keys and values of the tokens already seen, so that generating a token costs one token's work."""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.config import ModelConfig


class KVCache:
    """Room for `max_length` tokens of `batch` sequences in every layer: [batch, max_length, groups, head_dim]."""

    def __init__(
        self, config: ModelConfig, batch: int, max_length: int, dtype: torch.dtype, device: torch.device
    ):
        shape = (batch, max_length, config.query_groups, config.head_dim)
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.length = 0  # tokens seen by every layer

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes key and value [batch, new, groups, head_dim] behind what is there; returns all of them."""
        end = self.length + key.shape[1]
        self.keys[layer][:, self.length : end] = key
        self.values[layer][:, self.length : end] = value
        return self.keys[layer][:, :end], self.values[layer][:, :end]
