"""Rows of the engine's cache: fills them with sequences, and moves and clears them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megalith.generation.logits_state import UsedParts
from megalith.generation.prefix_reuse import PrefixReuse
from megalith.generation.requests import RowSequence, Sampling
from megalith.generation.static_cache import RecurrentStates, empty_cache
from megalith.hardware import to_device


class EngineRows:
    """Base class of Engine that assigns sequences to rows and manages the rows' device state."""

    @torch.no_grad()
    def reset_state(self, sampling: Sampling) -> None:
        """Reset the state of all rows to idle; allocate the cache if needed."""
        if self._cache is None:
            groups = -(-self.config.query_groups // self.tp.size)
            sizes = self.max_rows, self._room, groups
            self._cache = empty_cache(self.config, *sizes, self.device, self.dtype)
            self._states = RecurrentStates.empty(
                self.model, self.max_rows, self.device, self.dtype, by_chunk=self._batch_invariant
            )
            if self._reuses and self._states is None and self._original_context == math.inf:
                self._prefixes = PrefixReuse(self._cache, self._prefix_cache_bytes)
            # Per row: newest token, its position, number of sampled tokens, their limit, noise key, active flag, if
            # stop tokens end it, and the slot of its adapter.
            self._state = torch.zeros(8, self.max_rows, dtype=torch.int64, device=self.device)
            self._row_settings = torch.zeros(
                4, self.max_rows, device=self.device
            )  # see ops.gumbel.sample_rows
            tokens = self.window * len(self._offsets)
            self._ids = torch.zeros(tokens, self.max_rows, dtype=torch.int64, device=self.device)
            self._logprobs = torch.zeros(tokens, self.max_rows, device=self.device)
            self._routes = None  # int16 [tokens, rows, layers with experts, topk]
            if self._routed_layers:
                empty = self._route_memory(tokens * self.max_rows).transpose(0, 1).contiguous()
                self._routes = empty.unflatten(0, (tokens, self.max_rows))
            self._tick = self._offsets.clone()  # rows of these where a step writes
            self._stops = torch.zeros(self.config.vocab_size, dtype=torch.bool, device=self.device)
        if self._prefixes is not None and not self._has_own_weights:  # they may have changed
            self._prefixes.forget()
        self._state.zero_()
        self._stops.zero_()
        self._tick.copy_(self._offsets)
        if self._drafter is not None:
            self._drafter.reset(sampling)
        if sampling.stop and sampling.forced_lengths is None:
            self._stops[torch.tensor(sampling.stop, device=self.device)] = True
        if self._graphed:
            for filters in (0, 1) if sampling.by_row else (sampling.top_k,):
                self._graph(replace(sampling, top_k=filters), UsedParts.of(sampling.processing))

    def _route_memory(self, tokens: int) -> Tensor | None:
        """Allocate memory for the expert routing of a forward pass, int16 [layers with experts, tokens, topk].

        None if it is not recorded.
        """
        if not self._routed_layers:
            return None
        sizes = len(self._routed_layers), tokens, self.config.moe_router_topk
        return torch.zeros(sizes, dtype=torch.int16, device=self.device)

    def choose_rows(self, sequences: Sequence[RowSequence], free: Sequence[int]) -> list[int]:
        """Select a free row for each sequence. The caller must ensure that there are enough."""
        if self._prefixes is None:
            return list(free[: len(sequences)])
        return self._prefixes.choose_rows(sequences, free)

    def fill_rows(self, begun: Sequence[tuple[int, RowSequence]]) -> None:
        """Assign rows to sequences: prefill the rows and initialize their state."""
        rows = to_device(torch.tensor([row for row, _ in begun]), self.device)
        if self._states is not None:
            self._states.clear(rows)
        routes = self.prefill(begun)
        if self._prefixes is not None:
            self._prefixes.filled(begun)
        if self._drafter is not None:
            self._drafter.fill_rows(begun)
        for row, sequence in begun:
            if row in routes and not sequence.routes:
                sequence.routes.append(routes[row])
        state = [self._first_state(sequence) for _, sequence in begun]
        self._state[:, rows] = to_device(torch.tensor(state).T.contiguous(), self.device)
        if any(sequence.sampling is not None for _, sequence in begun):
            settings = torch.tensor([sequence.sampling for _, sequence in begun])
            self._row_settings[:, rows] = to_device(settings.T.contiguous(), self.device)
        self._logits_state.begin(begun, lambda sequence: sequence.prompt)

    def set_masks(self, masks: np.ndarray) -> None:
        """Set the masks of allowed next tokens for rows 0 to rows - 1, int32 [rows, words], one bit per token."""
        self._logits_state.set_masks(masks)

    def _first_state(self, sequence: RowSequence) -> list[int]:
        last = sequence.ids[-1] if sequence.ids else sequence.prompt[-1]
        sequence.pause_at, sequence.launched = sequence.limit, len(sequence.ids)
        if sequence.length <= self._original_context:
            sequence.pause_at = min(sequence.limit, self._original_context + 1 - len(sequence.prompt))
        count, stops = len(sequence.ids), int(bool(sequence.stop))
        last_position, adapter = sequence.length - 1, sequence.adapter
        return [last, last_position, count, sequence.pause_at, sequence.noise, 1, stops, adapter]

    def clear_row(self, row: int) -> None:
        """Mark a row as idle."""
        self._state[:, row] = 0

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy the row of a sequence of `length` tokens to another row."""
        self._cache[:, :, target, :length] = self._cache[:, :, source, :length]
        self._state[:, target] = self._state[:, source]
        self._row_settings[:, target] = self._row_settings[:, source]
        self._logits_state.move(source, target)
        if self._states is not None:
            self._states.move(source, target)
        if self._prefixes is not None:
            self._prefixes.moved(source, target)
        if self._drafter is not None:
            self._drafter.move_row(source, target, length)
