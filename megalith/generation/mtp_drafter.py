"""Drafts from the model's own multi-token prediction layers (models/mtp.py), for speculative decoding.

With the newest token t_p at position p, the inputs h of the output layer are known up to position p - 1. MTP layer 1
predicts t_{p+1} from h_{p-1} and the embedding of t_p, layer 2 predicts t_{p+2} from the first's output and the
embedding of that draft, and so on. After that, the last layer runs again on its own output, one position further for
each draft.

MTP layers have their own keys and values. Verification computes h of the newest token and of the drafts. In the next
step, the layers first process h of the accepted tokens. Every row has a window with a position for each draft; results
at positions of rejected drafts are overwritten later.

Cached keys and values of layers after the first can come from drafts that were not accepted or, at the end of a prompt,
from tokens that were not known yet. This changes drafts, but not what the model samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalith.generation.requests import RowSequence, Sampling
from megalith.generation.speculation import NO_DRAFT, DecodeRows
from megalith.generation.static_cache import Decode, Prefill
from megalith.models.cache import Cache
from megalith.ops.cached_attention import visible_positions

if TYPE_CHECKING:
    from megalith.generation.engine import Engine


class MTPDrafter:
    """Proposes tokens by the MTP layers of the engine's model.

    Args:
        engine: the engine that verifies the drafts.
        drafts: drafts per step.
    """

    def __init__(self, engine: Engine, drafts: int):
        self._engine, self._drafts = engine, drafts
        self._layers = engine.config.mtp_layers
        self._cache: Tensor | None = None  # [MTP layers, 2, rows, room, groups, head_dim]

    def reset(self, sampling: Sampling) -> None:
        engine, config = self._engine, self._engine.config
        if self._cache is None:
            rows, width = engine.max_rows, self._drafts + 1
            groups = -(-config.query_groups // engine.tp.size)
            sizes = len(self._layers), 2, rows, engine.max_tokens + 2 * self._drafts, groups, config.head_dim
            options = dict(device=engine.device)
            self._cache = torch.zeros(sizes, dtype=engine.dtype, **options)
            # The last window of each row: its first position, h there and after it, and the tokens that follow.
            self._first = torch.zeros(rows, dtype=torch.int64, **options)
            self._hidden = torch.zeros(rows, width, config.hidden_size, dtype=engine.dtype, **options)
            self._tokens = torch.zeros(rows, width, dtype=torch.int64, **options)
        self._first.fill_(NO_DRAFT)

    def take_prompts(self, ids: Tensor, positions: Tensor, cache: Prefill, hidden: Tensor) -> None:
        """Process a prefill's final hidden states, [sequences, seq, hidden], of all tokens except the newest."""
        mtp_cache = replace(cache, keys_values=self._cache, attention_layers=self._layers, states=None)
        last = hidden[torch.arange(len(ids), device=ids.device), cache.lengths - 1]
        self._hidden[cache.rows, 0] = last[cache.prompts]
        self._first[cache.rows] = cache.lengths[cache.prompts] - 1
        for number in self._layers:
            ids = ids.roll(-1, 1)  # no row sees the last tokens, of which the newest is unknown here
            hidden = self._run(number, hidden, ids, positions, mtp_cache, ids.shape[1] + 1)

    def fill_rows(self, begun: Sequence[tuple[int, RowSequence]]) -> None:
        for row, sequence in begun:
            self._tokens[row, 0] = sequence.ids[-1] if sequence.ids else sequence.prompt[-1]
            if sequence.length == 1:
                self._first[row] = NO_DRAFT

    def move_row(self, source: int, target: int, length: int) -> None:
        self._cache[:, :, target, :length] = self._cache[:, :, source, :length]
        for state in self.state:
            state[target] = state[source]

    def propose(self, rows: DecodeRows, sampling: Sampling) -> Tensor:
        engine, count, width = self._engine, len(rows.token), self._drafts + 1
        first, hidden = self._first[:count], self._hidden[:count]
        has_window = (first >= 0) & rows.alive.bool()
        first = first.clamp(min=0) * rows.alive
        # Index of the newest known h in the window.
        at = (rows.position - 1 - first).clamp(0, self._drafts)[:, None]
        tokens = torch.cat([self._tokens[:count], rows.token.new_zeros(count, width)], 1)
        positions = first[:, None] + torch.arange(width, device=first.device)
        drafts: list[Tensor] = []
        for ahead in range(self._drafts):
            if ahead < len(self._layers):
                number, ids = self._layers[ahead], tokens[:, ahead : ahead + width]
                hidden = self._run(number, hidden, ids, positions, self._decode(positions, rows.longest))
                newest = hidden.take_along_dim(at[..., None], 1)
            else:
                here = positions.gather(1, at) + (ahead + 1 - len(self._layers))
                cache = self._decode(here, rows.longest + ahead)
                newest = self._run(self._layers[-1], newest, drafts[-1][:, None], here, cache)
            logits = engine.head_logits(newest[:, 0])
            keys = engine.sampling_keys(rows.noise, rows.count + ahead)
            ids, _ = engine.sample_logits(logits, keys, sampling, rows.settings)
            drafts.append(ids.clamp(max=engine.config.vocab_size - 1))
            tokens.scatter_(1, at + 1 + ahead, drafts[-1][:, None])
        return torch.where(has_window[:, None], torch.stack(drafts, 1), NO_DRAFT)

    def take_hidden(self, hidden: Tensor) -> None:
        """Process the final hidden states of the newest tokens and the drafts, [rows, drafts + 1, hidden]."""
        self._hidden[: len(hidden)].copy_(hidden)

    def add(self, position: Tensor, ids: Tensor) -> None:
        self._first[: len(ids)].copy_(position)
        self._tokens[: len(ids)].copy_(ids)

    def release(self) -> None:
        self._cache = None

    @property
    def state(self) -> list[Tensor]:
        return [self._first, self._hidden, self._tokens]

    @property
    def nbytes(self) -> tuple[int, int]:
        parts = [] if self._cache is None else [self._cache, *self.state]
        return 0, sum(part.nbytes for part in parts)

    def _decode(self, positions: Tensor, longest: int) -> Decode:
        """Return the cache for a forward pass over `positions`, int64 [rows, tokens], of the rows 0 to rows - 1."""
        seen = [(at, visible_positions(at, longest + self._drafts)) for at in positions.unbind(1)]
        return Decode(self._cache[:, :, : len(positions)], self._layers, seen)

    def _run(
        self,
        number: int,
        hidden: Tensor,
        ids: Tensor,
        positions: Tensor,
        cache: Cache,
        length: int | None = None,
    ) -> Tensor:
        """Return MTP layer `number`'s output, [batch, seq, hidden]. `ids` are the tokens that follow the tokens of
        `hidden`.
        """
        model, config = self._engine.model, self._engine.config
        if config.learns_positions:  # drafts may follow the last position
            positions = positions.clamp(max=config.max_position_embeddings - 1)
        context = self._engine.context_of(ids, positions, cache, length)
        context.mtp_embeddings = model.embed(ids, context)
        return model.runner([model.layers[str(number)]], hidden, context)
