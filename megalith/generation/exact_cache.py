"""Caches of batch-invariant engines, with recurrences that are bitwise equal to the trainer's.

A row keeps the state before the current chunk of CHUNK tokens, counted from the sequence's first one, and the inputs of
the chunk's tokens. A decode step repeats the matmuls of the chunk (ops/batch_invariant/recurrences.py), so it costs as
much as the matmuls of up to CHUNK tokens. After the chunk's last token, the state is replaced by the one before the
next chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from megalith.generation.static_cache import Decode, Prefill
from megalith.ops import delta_rule, state_space
from megalith.ops.batch_invariant.recurrences import INVARIANT, convolution
from megalith.ops.chunks import CHUNK

Rule = Callable[..., tuple[Tensor, Tensor]]
"""Recurrence over inputs [batch, seq, ...], starting from `state`.

Returns the outputs, and the states before each chunk and at the end.
"""
_DELTA_RULE = partial(delta_rule.with_states, math=INVARIANT)


def _state_space(skip: Tensor) -> Rule:
    def rule(*inputs: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return state_space.with_states(*inputs, skip, state=state, math=INVARIANT)

    return rule


class _ExactRecurrences:
    """Operators of recurrent mixers, computed chunk by chunk."""

    convolution: ClassVar[Callable[..., Tensor]] = staticmethod(convolution)

    def delta_rule(self, *inputs: Tensor) -> Tensor:
        return self._by_chunk(_DELTA_RULE, inputs)

    def state_space(
        self, x: Tensor, step: Tensor, decay: Tensor, b: Tensor, c: Tensor, skip: Tensor
    ) -> Tensor:
        return self._by_chunk(_state_space(skip), (x, step, decay, b, c))

    def _by_chunk(self, rule: Rule, inputs: Sequence[Tensor]) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class ExactPrefill(_ExactRecurrences, Prefill):
    """Prefill cache of a batch-invariant engine. Stores the state before the current chunk and the chunk's inputs."""

    def _by_chunk(self, rule: Rule, inputs: Sequence[Tensor]) -> Tensor:
        out, states = rule(*inputs)
        sequence, begun = torch.arange(len(out), device=out.device), self.lengths // CHUNK
        self.states.matrices.index_copy_(0, self.rows, states[sequence, :, begun][self.prompts])
        flat = _flat(inputs)
        index = begun[:, None] * CHUNK + torch.arange(CHUNK, device=out.device)
        chunk = flat.take_along_dim(index.clamp(max=flat.shape[1] - 1)[..., None], 1)
        chunk = chunk.where((index < self.lengths[:, None])[..., None], 0.0)
        self.states.chunk.index_copy_(0, self.rows, chunk[self.prompts])
        return out


@dataclass(frozen=True)
class ExactDecode(_ExactRecurrences, Decode):
    """Decode cache of a batch-invariant engine. Each step computes the current chunk again."""

    def _by_chunk(self, rule: Rule, inputs: Sequence[Tensor]) -> Tensor:
        ((positions, _),) = self.tokens
        matrices, chunk = self.states.matrices, self.states.chunk
        place = (positions % CHUNK)[:, None, None]  # [rows, 1, 1]
        chunk.scatter_(1, place.expand(-1, 1, chunk.shape[2]), _flat(inputs))
        parts = chunk.split([x[0, 0].numel() for x in inputs], -1)
        out, states = rule(
            *(part.unflatten(-1, x.shape[2:]).to(x.dtype) for part, x in zip(parts, inputs)), state=matrices
        )
        is_last = place[..., None] == CHUNK - 1
        matrices.copy_(torch.where(is_last, states[:, :, -1], matrices))
        return out.take_along_dim(place[..., None], 1)


def _flat(inputs: Sequence[Tensor]) -> Tensor:
    """Concatenate the inputs of each token, tensors [batch, seq, ...], into one vector: float32 [batch, seq, total
    size].
    """
    return torch.cat([x.flatten(2).float() for x in inputs], -1)
