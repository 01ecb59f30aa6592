"""Prefill: forward passes that write the keys and values of prompts into rows of the engine's cache.

Rows with the same tokens and adapter share a pass, and rows with a known prefix run only the tokens after it. LongRoPE
changes the angles of a sequence that exceeds the original context; such a row is prefilled again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megalith.generation.mtp_drafter import MTPDrafter
from megalith.generation.prefix_reuse import tokens_of_adapter
from megalith.generation.requests import RowSequence
from megalith.generation.static_cache import ContinuedPrefill
from megalith.hardware import to_device
from megalith.models.cache import Cache
from megalith.models.pass_context import Context, LayerRoutes, PassLayout
from megalith.models.rope import local_rotary_tables, rotary_tables
from megalith.models.transformer import Stack
from megalith.ops.compiled import run_eagerly

PREFILL_TOKENS = 2**14  # maximum tokens per prefill pass
PREFILL_SCORES = 2**24  # maximum pairs of a new token and a key in a pass after known prefixes


@dataclass(frozen=True)
class _Prefix:
    """A prefix that is prefilled for several rows, with its adapter slot."""

    tokens: list[int]
    rows: list[int]
    adapter: int


class PrefillPasses:
    """Base class of Engine that runs prefill forward passes on the engine's cache and layers."""

    @property
    def _original_context(self) -> float:
        """Maximum length for which LongRoPE uses its short factors."""
        scaling = self.config.rope_scaling
        is_long = scaling is not None and scaling.type == "longrope"
        return scaling.original_max_position_embeddings if is_long else math.inf

    def prefill(self, begun: Sequence[tuple[int, RowSequence]]) -> dict[int, np.ndarray]:
        """Write the keys and values of all tokens but the last into the rows.

        Returns each row's expert routing if recorded.

        Completions of the same prompt share a pass.
        """
        routes: dict[int, np.ndarray] = {}
        groups: dict[tuple[int, int], _Prefix] = {}
        for row, sequence in begun:
            key = (sequence.prompt_index, sequence.number if sequence.ids else -1)
            tokens = [*sequence.prompt, *sequence.ids][:-1]
            if tokens:
                groups.setdefault(key, _Prefix(tokens, [], sequence.adapter)).rows.append(row)
        whole = list(groups.values())
        if self._prefixes is not None:
            placed = [(tokens_of_adapter(each.tokens, each.adapter), each.rows) for each in whole]
            lengths = self._prefixes.place(placed)
            self._prefill_rest([(each, begin) for each, begin in zip(whole, lengths) if begin])
            whole = [each for each, begin in zip(whole, lengths) if not begin]
        self.prefill_tokens += sum(len(each.tokens) for each in whole)
        batch: list[_Prefix] = []
        for each in sorted(whole, key=lambda each: len(each.tokens)):
            is_long = len(each.tokens) + 1 > self._original_context
            if batch and (
                len(each.tokens) * (len(batch) + 1) > PREFILL_TOKENS
                or is_long != (len(batch[0].tokens) + 1 > self._original_context)
            ):
                routes |= self._prefill_pass(batch)
                batch = []
            batch.append(each)
        return routes | self._prefill_pass(batch) if batch else routes

    def _prefill_rest(self, groups: Sequence[tuple[_Prefix, int]]) -> None:
        """Write the keys and values of the tokens after a prefix whose keys and values the rows already hold.

        Args:
            groups: for each group, its tokens and rows, and the length of the prefix.
        """
        self.reused_tokens += sum(begin for _, begin in groups)
        batch: list[tuple[_Prefix, int]] = []
        rest = [(len(each.tokens) - begin, len(each.tokens), each) for each, begin in groups]
        for new, length, each in sorted((one for one in rest if one[0]), key=lambda one: one[:2]):
            longest = max([length, *(len(one.tokens) for one, _ in batch)])
            count = len(batch) + 1
            if batch and (new * count > PREFILL_TOKENS or new * longest * count > PREFILL_SCORES):
                self._continued_pass(batch)
                batch = []
            batch.append((each, length - new))
        if batch:
            self._continued_pass(batch)

    def _continued_pass(self, batch: list[tuple[_Prefix, int]]) -> None:
        new = [each.tokens[begin:] for each, begin in batch]
        longest = max(map(len, new))
        self.prefill_tokens += sum(map(len, new))
        ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in new])
        begins = torch.tensor([begin for _, begin in batch])
        rows = torch.tensor([each.rows[0] for each, _ in batch])
        adapters = torch.tensor([each.adapter for each, _ in batch])
        # Each new token of each row, by its place in the cache and its index in the pass.
        slots_and_indices = [
            (row * self._room + begin + at, number * longest + at)
            for number, (each, begin) in enumerate(batch)
            for row in each.rows
            for at in range(len(each.tokens) - begin)
        ]
        slots, indices = torch.tensor(slots_and_indices).T.contiguous()
        ids, begins, rows, slots, indices, adapters = (
            to_device(x, self.device) for x in (ids, begins, rows, slots, indices, adapters)
        )
        end = max(len(each.tokens) for each, _ in batch)
        positions = begins[:, None] + torch.arange(longest, device=self.device)
        positions = positions.clamp(max=end - 1)  # of padding
        cache = ContinuedPrefill(
            self._cache, self._cached_layers, rows, positions, end, slots, indices, self._attend_continued
        )
        with run_eagerly():
            self._hidden(ids, positions, cache, end + 1, adapters=adapters)

    def _prefill_pass(self, batch: list[_Prefix]) -> dict[int, np.ndarray]:
        longest = len(batch[-1].tokens)
        inputs = (
            [each.tokens + [0] * (longest - len(each.tokens)) for each in batch],
            [row for each in batch for row in each.rows],
            [number for number, each in enumerate(batch) for _ in each.rows],
            [len(each.tokens) for each in batch],
            [each.adapter for each in batch],
        )
        ids, rows, prompts, lengths, adapters = (to_device(torch.tensor(x), self.device) for x in inputs)
        positions = torch.arange(longest, device=self.device).expand(len(batch), longest)
        cache = self._prefill_cache(self._cache, self._cached_layers, rows, prompts, lengths, self._states)
        routes = self._route_memory(len(batch) * longest)
        with run_eagerly():  # sizes differ between passes
            hidden = self._hidden(ids, positions, cache, longest + 1, routes, adapters)
            if isinstance(self._drafter, MTPDrafter):
                self._drafter.take_prompts(ids, positions, cache, hidden)
        if routes is None:
            return {}
        by_token = routes.transpose(0, 1).cpu().numpy()
        return {
            row: by_token[number * longest : number * longest + len(each.tokens)]
            for number, each in enumerate(batch)
            for row in each.rows
        }

    def _hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: Cache,
        length: int | None = None,
        routes: Tensor | None = None,
        adapters: Tensor | None = None,
    ) -> Tensor:
        """Return the last hidden states [batch, seq, hidden] of tokens.

        Args:
            ids: token ids, int64 [batch, seq].
            positions: position of each token in its sequence, int64 [batch, seq].
            cache: cache of the earlier tokens.
            length: length of the sequences. None means each ends at its position.
            routes: result of `_route_memory`, which receives the experts that the routers choose. None: not recorded.
            adapters: slots of the sequences' adapters, int64 [batch]. None means they have none.
        """
        context = self.context_of(ids, positions, cache, length, adapters)
        if routes is not None:
            layers = zip(self._routed_layers, routes, strict=True)
            context.routes = {number: LayerRoutes(recorded=of_layer) for number, of_layer in layers}
        model = self.model
        return Stack.forward(model, model.embed(ids, context), context)

    def context_of(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: Cache,
        length: int | None = None,
        adapters: Tensor | None = None,
    ) -> Context:
        """Return the layer context of a forward pass (see `_hidden`)."""
        context = Context(len(ids), PassLayout(), position_ids=positions, cache=cache)
        if self.slots:
            context.adapters = ids.new_zeros(len(ids)) if adapters is None else adapters
        if self.config.position_embedding_type == "rope":
            context.rotary = self._rotary(positions, length)
            if self.config.rotary_base_local is not None:
                context.rotary_local = local_rotary_tables(self.config, positions)
        if self.config.num_experts:
            context.global_token_ids = torch.arange(ids.numel(), device=ids.device)
        return context

    def _rotary(self, positions: Tensor, length: int | None) -> tuple[Tensor, Tensor]:
        original = self._original_context
        if length is not None or original == math.inf:
            return rotary_tables(self.config, positions, length or 0)
        short, long = (rotary_tables(self.config, positions, n) for n in (original, original + 1))
        is_long = (positions >= original)[..., None, None]
        return tuple(torch.where(is_long, b, a) for a, b in zip(short, long))
