"""KV cache in static tensors, as CUDA graphs require.

     keys_values [attention layers, 2, rows, room, groups, head_dim]

Other mixers instead have one state per row, independent of the sequence length (RecurrentStates).

A row belongs to one sequence at a time. `Prefill` fills rows with the tokens of prompts, and `ContinuedPrefill` with
the tokens after a prefix. `Decode` adds to each row one token and the drafts of the next ones. Each is the Cache of one
pass (models/cache.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.models.mixers.recurrent import Recurrent
from megalith.models.transformer import Transformer, layers_of
from megalith.ops import delta_rule, state_space
from megalith.ops.cached_attention import cached_attention, continued_attention
from megalith.ops.causal_conv import causal_conv
from megalith.ops.chunks import CHUNK
from megalith.ops.documents import chunk_ends


def empty_cache(
    config: ModelConfig, rows: int, room: int, groups: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return an empty cache with `groups` key and value heads per layer with attention."""
    layers = len(cached_layers(config))
    return torch.zeros(layers, 2, rows, room, groups, config.head_dim, device=device, dtype=dtype)


def cached_layers(config: ModelConfig) -> list[int]:
    """Return the indices of the layers with keys and values.

    MTP layers are excluded because generation does not run them.
    """
    return [layer for layer in range(config.num_layers) if config.has_attention(layer)]


@dataclass(frozen=True)
class LayerState:
    """Per-row state of one layer's mixer, for mixers other than attention."""

    tokens: Tensor  # [rows, taps − 1, units]: convolution inputs of the last tokens
    matrices: (
        Tensor | None
    )  # float32 [rows, heads, key size, value size]; None for a mixer that is only a convolution
    chunk: Tensor | None = None
    """float32 [rows, CHUNK, inputs]: the recurrence's inputs for the tokens after `matrices` (exact_cache.py). None:
    `matrices` is the state after all tokens."""

    @property
    def parts(self) -> list[Tensor]:
        return [part for part in (self.tokens, self.matrices, self.chunk) if part is not None]

    def first(self, rows: int) -> LayerState:
        """Return a view of the state of the first `rows` rows."""
        parts = (self.tokens, self.matrices, self.chunk)
        return LayerState(*(None if part is None else part[:rows] for part in parts))


@dataclass(frozen=True)
class RecurrentStates:
    """States of the layers with a mixer that is not attention, by layer number."""

    layers: Mapping[int, LayerState]

    @classmethod
    def empty(
        cls,
        model: Transformer,
        rows: int,
        device: torch.device,
        dtype: torch.dtype,
        by_chunk: bool = False,
    ) -> RecurrentStates | None:
        """Return zero states for this rank's heads. None if no layer needs them.

        by_chunk: store the state before the current chunk and the inputs of the chunk's tokens, instead of the current
        state.
        """
        layers = {}
        for layer in layers_of(model).values():
            for mixer in layer.mixers:
                if isinstance(mixer, Recurrent):
                    taps, units, matrices, inputs = mixer.state_sizes
                    tokens = torch.zeros(rows, taps - 1, units, device=device, dtype=dtype)
                    state = chunk = None
                    if matrices is not None:
                        state = torch.zeros(rows, *matrices, device=device)
                        chunk = torch.zeros(rows, CHUNK, inputs, device=device) if by_chunk else None
                    layers[layer.number] = LayerState(tokens, state, chunk)
        return cls(layers) if layers else None

    def at_layer(self, number: int) -> LayerState | None:
        """Return the layer's state. None if it has none."""
        return self.layers.get(number)

    def first(self, rows: int) -> RecurrentStates:
        """Return views of the states of the first `rows` rows."""
        return RecurrentStates({number: state.first(rows) for number, state in self.layers.items()})

    def move(self, source: int, target: int) -> None:
        """Copy the states of a row to another row."""
        for part in self.parts:
            part[target] = part[source]

    def clear(self, rows: Tensor) -> None:
        """Reset the states of rows for new sequences."""
        for part in self.parts:
            part.index_fill_(0, rows, 0)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def parts(self) -> list[Tensor]:
        """All tensors of the states."""
        return [part for state in self.layers.values() for part in state.parts]


@dataclass(frozen=True)
class Prefill:
    """Cache of a forward pass over complete prompts.

    They may be right-padded, because no token attends to later ones.
    """

    keys_values: Tensor | None
    """[attention layers, 2, rows, room, groups, head_dim].

    In the cache of one layer the first dimension is absent; None if the layer has no keys and values.
    """
    attention_layers: Sequence[int]  # indices of the layers with keys and values
    rows: Tensor  # int64 [filled rows]
    prompts: Tensor  # int64 [filled rows]: sequence of the pass for each row; several rows may share one
    lengths: Tensor | None = None  # int64 [sequences], needed for states
    states: RecurrentStates | LayerState | None = None  # within a layer, its own state

    def at_layer(self, number: int) -> Prefill:
        return replace(self, **_of_layer(self, number))

    convolution: ClassVar[Callable[..., Tensor]] = staticmethod(causal_conv)

    def convolve(self, x: Tensor, taps: Tensor, bias: Tensor | None = None) -> Tensor:
        cached = self.states.tokens
        count = cached.shape[1]
        if count:
            last = self.lengths[:, None] + torch.arange(-count, 0, device=x.device)
            last = last[..., None]  # [sequences, count, 1]
            tokens = x.take_along_dim(last.clamp(min=0), dim=1).where(last >= 0, 0)
            cached.index_copy_(0, self.rows, tokens[self.prompts])
        return self.convolution(x, taps, bias=bias)

    def delta_rule(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, share: Tensor) -> Tensor:
        is_token = self._is_token(query)
        of_decay = is_token[..., None] if decay.dim() == 4 else is_token  # per channel, or per head
        out, state = delta_rule.with_last_state(query, key, value, decay * of_decay, share * is_token)
        self.states.matrices.index_copy_(0, self.rows, state[self.prompts])
        return out

    def state_space(
        self, x: Tensor, step: Tensor, decay: Tensor, b: Tensor, c: Tensor, skip: Tensor
    ) -> Tensor:
        is_token = self._is_token(x)
        out, state = state_space.with_last_state(x, step * is_token, decay * is_token, b, c, skip)
        self.states.matrices.index_copy_(0, self.rows, state[self.prompts])
        return out

    def _is_token(self, x: Tensor) -> Tensor:
        """Return a mask that is False for padding at the end, bool [sequences, seq, 1], for x [sequences, seq, ...]."""
        return (torch.arange(x.shape[1], device=x.device) < self.lengths[:, None])[..., None]

    def attend(
        self,
        core: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        chunk: int | None = None,
        **how,
    ) -> Tensor:
        for cached, new in zip(self.keys_values, (key, value)):
            cached[:, : new.shape[1]].index_copy_(0, self.rows, new[self.prompts])
        batch, seq = query.shape[:2]
        if chunk is not None and seq > chunk:
            ends = torch.full((batch, 1), seq, dtype=torch.int32, device=query.device)
            how["documents"] = chunk_ends(ends, chunk, seq)
        return core(query, key, value, **how)


@dataclass(frozen=True)
class ContinuedPrefill:
    """Cache of a forward pass over the tokens that follow a prefix whose keys and values the rows already hold.

    Sequences may be padded at the end. Layers with a state are not supported.
    """

    keys_values: Tensor  # like Prefill's
    attention_layers: Sequence[int]
    rows: Tensor  # int64 [sequences]: a row of each sequence
    positions: Tensor  # int64 [sequences, seq]
    longest: int  # maximum length of a sequence with its prefix
    slots: Tensor  # int64 [stored]: places in the flattened rows · room
    tokens: Tensor  # int64 [stored]: for each place, its token in the flattened sequences · seq
    attend_continued: Callable[..., Tensor] = continued_attention

    def at_layer(self, number: int) -> ContinuedPrefill:
        return replace(self, keys_values=self.keys_values[self.attention_layers.index(number)])

    def attend(self, core: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, **how) -> Tensor:
        for cached, new in zip(self.keys_values, (key, value)):
            cached.flatten(0, 1).index_copy_(0, self.slots, new.flatten(0, 1)[self.tokens])
        keys, values = self.keys_values[:, self.rows, : self.longest]
        names = ("window", "softcap", "scale", "sink", "chunk")
        how = {name: how[name] for name in names if name in how}
        return self.attend_continued(query, keys, values, self.positions, **how)


@dataclass(frozen=True)
class Decode:
    """Cache of a forward pass over the newest token of each row and its drafts."""

    keys_values: Tensor | None  # like Prefill's, for the rows of the pass
    attention_layers: Sequence[int]
    tokens: Sequence[tuple[Tensor, Tensor | None]]
    """For each token of a row: its position, int64 [rows], and what it sees (`visible_positions`)."""
    states: RecurrentStates | LayerState | None = None  # within a layer, its own state
    attend_cached: Callable[..., Tensor] = cached_attention

    def at_layer(self, number: int) -> Decode:
        return replace(self, **_of_layer(self, number))

    convolution: ClassVar[Callable[..., Tensor]] = staticmethod(causal_conv)

    def convolve(self, x: Tensor, taps: Tensor, bias: Tensor | None = None) -> Tensor:
        tokens = torch.cat([self.states.tokens, x], dim=1)
        self.states.tokens.copy_(tokens[:, 1:])
        return self.convolution(tokens, taps, bias=bias)[:, -1:]

    def delta_rule(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, share: Tensor) -> Tensor:
        out, state = delta_rule.next_token(self.states.matrices, query, key, value, decay, share)
        self.states.matrices.copy_(state)
        return out

    def state_space(
        self, x: Tensor, step: Tensor, decay: Tensor, b: Tensor, c: Tensor, skip: Tensor
    ) -> Tensor:
        out, state = state_space.next_token(self.states.matrices, x, step, decay, b, c, skip)
        self.states.matrices.copy_(state)
        return out

    def attend(self, core: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, **how) -> Tensor:
        names = ("window", "softcap", "scale", "sink", "alibi", "first_head", "chunk")
        how = {name: how[name] for name in names if name in how}
        outputs = []
        for n, (positions, visible) in enumerate(self.tokens):
            new = (x[:, n : n + 1] for x in (query, key, value))
            outputs.append(self.attend_cached(*new, self.keys_values, positions, visible, **how))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def _of_layer(cache: Prefill | Decode, number: int) -> dict[str, Any]:
    """Return the fields `keys_values` and `states` of a layer's cache."""
    keys_values = None
    if number in cache.attention_layers:
        keys_values = cache.keys_values[cache.attention_layers.index(number)]
    return dict(keys_values=keys_values, states=cache.states and cache.states.at_layer(number))
