"""A cache of keys and values whose tensors stay where they are, so that a CUDA graph can be made over them.

    keys_values [layers, 2, rows, room, groups, head_dim]

A row belongs to one sequence at a time. `Prefill` fills rows with the tokens of prompts, `Decode` adds a token to each;
both are the Cache of one pass (models/pass_context.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.ops.attention_core import cached_attention


def empty_cache(
    config: ModelConfig, rows: int, room: int, groups: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """A cache of `groups` key and value heads a layer, without tokens."""
    return torch.zeros(config.num_layers, 2, rows, room, groups, config.head_dim, device=device, dtype=dtype)


@dataclass(frozen=True)
class Prefill:
    """A pass over whole prompts, behind which there may be padding: no token sees what is behind it."""

    keys_values: Tensor  # [layers, 2, rows, room, groups, head_dim]; at a layer without the first dimension
    rows: Tensor  # int64 [filled rows]
    prompts: Tensor  # int64 [filled rows]: which of the pass's sequences each gets; several may get the same

    def at_layer(self, number: int) -> Prefill:
        return replace(self, keys_values=self.keys_values[number])

    def attend(self, core: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, **how) -> Tensor:
        for cached, new in zip(self.keys_values, (key, value)):
            cached[:, : new.shape[1]].index_copy_(0, self.rows, new[self.prompts])
        return core(query, key, value, **how)


@dataclass(frozen=True)
class Decode:
    """A pass over the newest token of each row."""

    keys_values: Tensor  # as Prefill's, of the rows that the pass has
    places: Tensor  # int64 [rows]: where the tokens stand
    seen: Tensor | None  # of them, as ops.attention_core.seen_places gives

    def at_layer(self, number: int) -> Decode:
        return replace(self, keys_values=self.keys_values[number])

    def attend(self, core: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, **how) -> Tensor:
        how = {name: how[name] for name in ("window", "softcap", "scale")}
        return cached_attention(query, key, value, self.keys_values, self.places, self.seen, **how)
