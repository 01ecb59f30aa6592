"""Keys and values of the tokens already seen, so that generating a token costs one token's work."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Room for `max_length` tokens in every layer that uses it; made when a layer first does."""

    def __init__(self, max_length: int):
        self.max_length = max_length
        self.length = 0  # tokens seen by every layer
        self._layers: dict[int, Tensor] = {}  # [2, batch, max_length, groups, head_dim]

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes key and value [batch, new, groups, head_dim] behind what is there; returns all of them."""
        if layer not in self._layers:
            batch, _, groups, head_dim = key.shape
            self._layers[layer] = key.new_empty(2, batch, self.max_length, groups, head_dim)
        end = self.length + key.shape[1]
        both = self._layers[layer]
        both[:, :, self.length : end] = torch.stack([key, value])
        return both[0, :, :end], both[1, :, :end]
