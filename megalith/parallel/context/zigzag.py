"""How context parallelism shards a sequence, and what of a shard a rank's queries see.

A sequence is cut into 2·size chunks, of which rank r has r and 2·size − 1 − r. Causal attention gives late tokens
more work than early ones. With an early and a late chunk each, all ranks have the same (Brandon et al. 2023;
Megatron-LM does the same). For size 2: rank 0 has chunks 0 and 3, rank 1 has 1 and 2.

Where keys and values are sent (ring.py), a shard of them is one block of attention, whose documents the kernels take
and whose window, where there is dropout too, is a mask. Under a window without dropout it is a block for each pair of
chunks, one of the rank's own and one of the shard's, of no more queries and keys than are near enough to see each
other: the kernel gets the window with how far the last query is ahead of the last key, and nothing of [queries, keys]
is made. Documents and window together are a mask where two different chunks meet, of at most the window's length each
way.
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
    """The places in the whole sequence of a rank's `seq` tokens: its two chunks."""
    chunk = seq // 2
    return [range(first * chunk, (first + 1) * chunk) for first in (rank, 2 * size - 1 - rank)]


def zigzag(x: Tensor, size: int, dim: int) -> Tensor:
    """Every rank's chunks, from the whole sequence along `dim`: [size, ..., seq, ...], `dim` without the new first."""
    early, late = x.unflatten(dim, (2, size, -1)).unbind(dim)  # [..., size, chunk, ...] each
    return torch.cat([early, late.flip(dim)], dim=dim + 1).movedim(dim, 0)


def from_zigzag(shards: Tensor, dim: int) -> Tensor:
    """The whole sequence along `dim`, from every rank's chunks [size, ..., seq, ...]: the inverse of zigzag."""
    early, late = shards.movedim(0, dim).chunk(2, dim=dim + 1)  # [..., size, chunk, ...] each
    return torch.cat([early, late.flip(dim)], dim=dim).flatten(dim, dim + 1)


@dataclass(frozen=True)
class KeyBlock:
    """Some keys and values, and which of this rank's queries see them: all of them, or if causal up to themselves."""

    pair: Tensor  # keys and values [2, batch, keys, groups, head_dim]
    places: list[range]  # of the keys
    first_query: int = 0  # queries from here on
    causal: bool = False


class ShardPart(NamedTuple):
    """What is computed of a shard at once."""

    queries: slice  # of this rank's
    keys: slice  # of the shard's
    block: Block


class ShardMasks:
    """What is masked and dropped of each block."""

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
        own_shard: KeyBlock,
    ):
        self.documents, self.dropout_rows = documents, dropout_rows
        self.window, self.softcap, self.scale = window, softcap, scale
        self.dropout, self.first_head = dropout, first_head
        self.own_positions = own_shard.places
        device = own_shard.pair.device
        self.slopes = None if alibi is None else alibi_slopes(alibi, first_head, heads, device)

    @property
    def by_chunk(self) -> bool:
        """Whether a shard has more than one part. Dropout has one state of its random numbers a shard."""
        return self.window is not None and not self.dropout

    def parts(self, shard: KeyBlock) -> Iterator[ShardPart]:
        if not self.by_chunk:
            yield ShardPart(slice(shard.first_query, None), slice(None), self._whole(shard))
            return
        pairs = list(product(_with_offsets(self.own_positions), _with_offsets(shard.places)))
        for (at, queries), (key_at, keys) in sorted(pairs, key=lambda pair: pair[0][1] != pair[1][1]):
            keys_seen = range(max(keys.start, queries.start - self.window + 1), min(keys.stop, queries.stop))
            end = min(queries.stop, keys_seen.stop - 1 + self.window)
            seeing = range(max(queries.start, keys_seen.start), end)
            if keys_seen and seeing:
                own, other = _shifted(seeing, at - queries.start), _shifted(keys_seen, key_at - keys.start)
                yield ShardPart(own, other, self._near(seeing, keys_seen, shard.pair.device))

    def _near(self, queries: range, keys: range, device: torch.device) -> Block:
        """Of places that are within the window of each other."""
        documents, positions = None, (None, None)
        if self.documents is not None:
            documents = tuple(ends_in_spans(self.documents, [places]) for places in (queries, keys))
        if self.slopes is not None:
            positions = tuple(_joined([places], device) for places in (queries, keys))
        return Block(
            documents=documents,
            window=self.window,
            ahead=queries.stop - keys.stop,
            query_positions=positions[0],
            key_positions=positions[1],
            **self._scores,
        )

    def _whole(self, shard: KeyBlock) -> Block:
        mask = documents = queries = keys = rows = None
        device = shard.pair.device
        if self.documents is not None:
            own = (ends_in_spans(self.documents, self.own_positions) - shard.first_query).clamp(min=0)
            documents = own, ends_in_spans(self.documents, shard.places)
        if self.dropout or self.slopes is not None:
            queries = _joined(self.own_positions, device)[shard.first_query :]
            keys = _joined(shard.places, device)
        if self.window is not None:
            distance = queries[:, None] - keys
            mask = ((distance >= 0) & (distance < self.window))[None, None]
        if self.dropout:
            rows = self.dropout_rows[:, shard.first_query :]
        dropped = dict(dropout=self.dropout, dropout_rows=rows, key_positions=keys, query_positions=queries)
        causal = shard.causal and mask is None
        return Block(causal, mask, documents, **self._scores, **dropped, first_head=self.first_head)

    @property
    def _scores(self) -> dict[str, Any]:
        return dict(softcap=self.softcap, scale=self.scale, slopes=self.slopes)


def _with_offsets(places: list[range]) -> list[tuple[int, range]]:
    """Each span, behind where it begins among all of them."""
    return list(zip(accumulate(map(len, places), initial=0), places))


def _shifted(span: range, by: int) -> slice:
    return slice(span.start + by, span.stop + by)


def _joined(places: list[range], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(span.start, span.stop, device=device) for span in places])
