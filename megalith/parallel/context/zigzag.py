"""Zigzag sharding of a sequence for context parallelism, and the masks of its attention blocks.

A sequence is split into 2·size chunks, and rank r has chunks r and 2·size − 1 − r. Causal attention takes more work for
late tokens than for early ones; with an early and a late chunk, all ranks have the same work (Brandon et al. 2023;
Megatron-LM does the same). For size 2, rank 0 has chunks 0 and 3, and rank 1 has 1 and 2.

A ring (ring.py) computes one attention block per shard of keys and values. Kernels mask documents themselves. A window
without dropout is computed per pair of chunks, on the queries and keys of the pair that can see each other. The kernel
then gets the window and the distance from the last key to the last query, and no mask [queries, keys] is needed. A
window with dropout needs such a mask. A window with documents needs one of at most window × window where two chunks
meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalith.ops.attention_kernels import Block
from megalith.ops.documents import alibi_slopes, ends_in_spans


def spans(rank: int, size: int, seq: int) -> list[range]:
    """Return the positions in the full sequence of a rank's `seq` tokens, which form two chunks."""
    chunk = seq // 2
    return [range(first * chunk, (first + 1) * chunk) for first in (rank, 2 * size - 1 - rank)]


def zigzag(x: Tensor, size: int, dim: int) -> Tensor:
    """Split the full sequence along `dim` into every rank's chunks: [size, ..., seq, ...]."""
    early, late = x.unflatten(dim, (2, size, -1)).unbind(dim)  # [..., size, chunk, ...] each
    return torch.cat([early, late.flip(dim)], dim=dim + 1).movedim(dim, 0)


def from_zigzag(shards: Tensor, dim: int) -> Tensor:
    """Join every rank's chunks [size, ..., seq, ...] to the full sequence along `dim`: the inverse of zigzag."""
    early, late = shards.movedim(0, dim).chunk(2, dim=dim + 1)  # [..., size, chunk, ...] each
    return torch.cat([early, late.flip(dim)], dim=dim).flatten(dim, dim + 1)


@dataclass(frozen=True)
class KeyBlock:
    """A block of keys and values, and the local queries that attend to it."""

    pair: Tensor  # keys and values [2, batch, keys, groups, head_dim]
    positions: list[range]  # of the keys in the full sequence
    first_query: int = 0  # queries from this one on attend to it
    causal: bool = False  # True: to keys up to their own position only


class ShardPart(NamedTuple):
    """The slice of a shard that one kernel call computes."""

    queries: slice  # of the local queries
    keys: slice  # of the shard
    block: Block


class ShardMasks:
    """Masks and dropout of each attention block."""

    def __init__(
        self,
        documents: Tensor | None,
        dropout_rows: Tensor | None,
        window: int | None,
        softcap: float | None,
        scale: float | None,
        alibi: int | None,
        dropout: float,
        first_head: int,
        heads: int,
        local_shard: KeyBlock,
    ):
        self.documents, self.dropout_rows = documents, dropout_rows
        self.window, self.softcap, self.scale = window, softcap, scale
        self.dropout, self.first_head = dropout, first_head
        self.query_positions = local_shard.positions
        device = local_shard.pair.device
        self.slopes = None if alibi is None else alibi_slopes(alibi, first_head, heads, device)

    @property
    def by_chunk(self) -> bool:
        """Return True to compute attention per pair of chunks, False per shard. Dropout requires False: its table has
        one random state per shard.
        """
        return self.window is not None and not self.dropout

    def parts(self, shard: KeyBlock) -> Iterator[ShardPart]:
        if not self.by_chunk:
            yield ShardPart(slice(shard.first_query, None), slice(None), self._shard_block(shard))
            return
        pairs = list(product(_with_offsets(self.query_positions), _with_offsets(shard.positions)))
        for (at, queries), (key_at, keys) in sorted(pairs, key=lambda pair: pair[0][1] != pair[1][1]):
            visible_keys = range(
                max(keys.start, queries.start - self.window + 1), min(keys.stop, queries.stop)
            )
            end = min(queries.stop, visible_keys.stop - 1 + self.window)
            visible_queries = range(max(queries.start, visible_keys.start), end)
            if visible_keys and visible_queries:
                query_slice = _shifted(visible_queries, at - queries.start)
                key_slice = _shifted(visible_keys, key_at - keys.start)
                block = self._window_block(visible_queries, visible_keys, shard.pair.device)
                yield ShardPart(query_slice, key_slice, block)

    def _window_block(self, queries: range, keys: range, device: torch.device) -> Block:
        """Return the block of queries and keys that are within the window of each other."""
        documents, positions = None, (None, None)
        if self.documents is not None:
            documents = tuple(ends_in_spans(self.documents, [span]) for span in (queries, keys))
        if self.slopes is not None:
            positions = tuple(_indices([span], device) for span in (queries, keys))
        return Block(
            documents=documents,
            window=self.window,
            ahead=queries.stop - keys.stop,
            query_positions=positions[0],
            key_positions=positions[1],
            **self._scores,
        )

    def _shard_block(self, shard: KeyBlock) -> Block:
        mask = documents = queries = keys = rows = None
        device = shard.pair.device
        if self.documents is not None:
            query_ends = (ends_in_spans(self.documents, self.query_positions) - shard.first_query).clamp(
                min=0
            )
            documents = query_ends, ends_in_spans(self.documents, shard.positions)
        if self.dropout or self.slopes is not None:
            queries = _indices(self.query_positions, device)[shard.first_query :]
            keys = _indices(shard.positions, device)
        if self.window is not None:
            distance = queries[:, None] - keys
            mask = ((distance >= 0) & (distance < self.window))[None, None]
        if self.dropout:
            rows = self.dropout_rows[:, shard.first_query :]
        dropout = dict(dropout=self.dropout, dropout_rows=rows, key_positions=keys, query_positions=queries)
        causal = shard.causal and mask is None
        return Block(causal, mask, documents, **self._scores, **dropout, first_head=self.first_head)

    @property
    def _scores(self) -> dict[str, Any]:
        return dict(softcap=self.softcap, scale=self.scale, slopes=self.slopes)


def _with_offsets(spans: list[range]) -> list[tuple[int, range]]:
    """Return each span with its offset in the concatenation of all spans."""
    return list(zip(accumulate(map(len, spans), initial=0), spans))


def _shifted(span: range, by: int) -> slice:
    return slice(span.start + by, span.stop + by)


def _indices(spans: list[range], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(span.start, span.stop, device=device) for span in spans])
