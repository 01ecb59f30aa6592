"""KV cache in static tensors, as CUDA graphs require.

     keys_values [layers, 2, rows, room, groups, head_dim]

Layers of linear attention instead have one state per row, independent of the sequence length (LinearStates).

A row belongs to one sequence at a time. `Prefill` fills rows with the tokens of prompts, `Decode` adds one token to
each row. Each is the Cache of one pass (models/cache.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.ops.attention_core import cached_attention
from megalith.ops.delta_rule import causal_conv, next_token, with_last_state


def empty_cache(
    config: ModelConfig, rows: int, room: int, groups: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return an empty cache with `groups` key and value heads per layer."""
    return torch.zeros(config.num_layers, 2, rows, room, groups, config.head_dim, device=device, dtype=dtype)


@dataclass(frozen=True)
class LinearStates:
    """Per-row state of linear-attention layers."""

    layers: Sequence[int]  # layer numbers
    tokens: Tensor  # [layers, rows, taps − 1, units]: convolution inputs of the last tokens
    matrices: Tensor  # float32 [layers, rows, value heads, key size, value size]

    @classmethod
    def empty(
        cls, config: ModelConfig, rows: int, parts: int, device: torch.device, dtype: torch.dtype
    ) -> LinearStates | None:
        """Return zero states for one of `parts` tensor-parallel ranks. None if no layer needs them."""
        layers = config.linear_attention_layers
        if not layers:
            return None
        keys, values = config.linear_num_key_heads // parts, config.linear_num_value_heads // parts
        sizes = config.linear_key_head_dim, config.linear_value_head_dim
        units = 2 * keys * sizes[0] + values * sizes[1]
        tokens = torch.zeros(
            len(layers), rows, config.linear_conv_kernel_dim - 1, units, device=device, dtype=dtype
        )
        return cls(layers, tokens, torch.zeros(len(layers), rows, values, *sizes, device=device))

    def at_layer(self, number: int) -> tuple[Tensor, Tensor] | None:
        """Return the layer's tokens and matrices [rows, …]. None if it has no state."""
        if number not in self.layers:
            return None
        index = self.layers.index(number)
        return self.tokens[index], self.matrices[index]

    def first(self, rows: int) -> LinearStates:
        return replace(self, tokens=self.tokens[:, :rows], matrices=self.matrices[:, :rows])

    def move(self, source: int, target: int) -> None:
        for states in (self.tokens, self.matrices):
            states[:, target] = states[:, source]

    def clear(self, rows: Tensor) -> None:
        """Reset rows for new sequences."""
        for states in (self.tokens, self.matrices):
            states.index_fill_(1, rows, 0)

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.matrices.nbytes


@dataclass(frozen=True)
class Prefill:
    """Cache of a pass over complete prompts, which may be padded at the end: no token attends to later ones."""

    keys_values: (
        Tensor  # [layers, 2, rows, room, groups, head_dim]; within a layer without the first dimension
    )
    rows: Tensor  # int64 [filled rows]
    prompts: Tensor  # int64 [filled rows]: sequence of the pass for each row; several rows may share one
    lengths: Tensor | None = None  # int64 [sequences], needed for linear states
    linear: LinearStates | tuple[Tensor, Tensor] | None = None  # within a layer, its own state

    def at_layer(self, number: int) -> Prefill:
        linear = self.linear and self.linear.at_layer(number)
        return replace(self, keys_values=self.keys_values[number], linear=linear)

    def convolve(self, x: Tensor, taps: Tensor) -> Tensor:
        cached, _ = self.linear
        count = cached.shape[1]
        if count:
            last = self.lengths[:, None] + torch.arange(-count, 0, device=x.device)
            last = last[..., None]  # [sequences, count, 1]
            tokens = x.take_along_dim(last.clamp(min=0), dim=1).where(last >= 0, 0)
            cached.index_copy_(0, self.rows, tokens[self.prompts])
        return causal_conv(x, taps)

    def delta_rule(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, share: Tensor) -> Tensor:
        is_token = (torch.arange(query.shape[1], device=query.device) < self.lengths[:, None])[..., None]
        out, state = with_last_state(query, key, value, decay * is_token, share * is_token)
        self.linear[1].index_copy_(0, self.rows, state[self.prompts])
        return out

    def attend(self, core: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, **how) -> Tensor:
        for cached, new in zip(self.keys_values, (key, value)):
            cached[:, : new.shape[1]].index_copy_(0, self.rows, new[self.prompts])
        return core(query, key, value, **how)


@dataclass(frozen=True)
class Decode:
    """Cache of a pass over the newest token of each row."""

    keys_values: Tensor  # like Prefill's, for the rows of the pass
    positions: Tensor  # int64 [rows]: positions of the tokens
    visible: Tensor | None  # from ops.attention_core.visible_positions
    linear: LinearStates | tuple[Tensor, Tensor] | None = None  # within a layer, its own state

    def at_layer(self, number: int) -> Decode:
        linear = self.linear and self.linear.at_layer(number)
        return replace(self, keys_values=self.keys_values[number], linear=linear)

    def convolve(self, x: Tensor, taps: Tensor) -> Tensor:
        tokens = torch.cat([self.linear[0], x], dim=1)
        self.linear[0].copy_(tokens[:, 1:])
        return causal_conv(tokens, taps)[:, -1:]

    def delta_rule(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, share: Tensor) -> Tensor:
        out, state = next_token(self.linear[1], query, key, value, decay, share)
        self.linear[1].copy_(state)
        return out

    def attend(self, core: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, **how) -> Tensor:
        how = {name: how[name] for name in ("window", "softcap", "scale", "sink", "alibi", "first_head")}
        return cached_attention(query, key, value, self.keys_values, self.positions, self.visible, **how)
