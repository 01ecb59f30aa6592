"""Largest attention logit per head: the maximum of scale · query · key over all visible pairs.

Fused attention kernels do not return it. Here it is computed in tiles of scores, so that no full score matrix is in
memory. Tiles that causality or a window hides are skipped. The cost is one of the two matmuls of attention's forward
pass, and writing and reading each score once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import and_

import torch
from torch import Tensor

from megalith.ops.documents import document_ids, query_and_key_ends

KEYS = 2048
"""Keys per tile."""
TILE = 2**25
"""Scores per tile, about."""


@torch.no_grad()
def max_logits(
    query: Tensor,
    key: Tensor,
    *,
    scale: float,
    spans: Sequence[range] | None = None,
    causal: bool = True,
    mask: Tensor | None = None,
    documents: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Return the largest logit of each head, before soft-capping, biases and attention sinks.

    Args:
        query: [batch, queries, heads, head_dim].
        key: [batch, keys, groups, head_dim], of full sequences.
        scale: factor on query · key, positive.
        spans: positions of the queries among the keys, as consecutive ranges. Default: all.
        causal: queries see no later keys. `mask` replaces it.
        mask: bool [batch or 1, 1, keys, keys], True where a query sees a key.
        documents: int32 [batch, documents], ends of documents, between which there is no attention.
        window: maximum number of keys that a query sees, including its own.

    Returns:
        float32 [heads], -inf for a head that sees nothing.
    """
    batch, keys, groups, _ = key.shape
    heads = query.shape[2]
    ids = None if documents is None else document_ids(query_and_key_ends(documents)[1], keys)
    query = query.unflatten(2, (groups, -1)).movedim(1, 3)  # [batch, groups, in group, queries, head_dim]
    key = key.permute(0, 2, 3, 1)  # [batch, groups, head_dim, keys]
    largest = query.new_full((groups, heads // groups), float("-inf"), dtype=torch.float32)
    before = causal and mask is None
    for first, rows, columns in _tiles(spans or [range(keys)], keys, batch * heads, before, window):
        part = query[:, :, :, first : first + len(rows)]
        scores = part.flatten(2, 3) @ key[..., columns.start : columns.stop]
        scores = scores.unflatten(2, part.shape[2:4])  # [batch, groups, in group, rows, columns]
        visible = _visible(rows, columns, before, mask, ids, window, key.device)
        if visible is not None:
            scores = scores.masked_fill(~visible[:, :, None], float("-inf"))
        largest = torch.maximum(largest, scores.amax((0, 3, 4)).float())
    return largest.flatten() * scale


def _tiles(
    spans: Sequence[range], keys: int, heads: int, causal: bool, window: int | None
) -> Iterator[tuple[int, range, range]]:
    """Yield each tile's index of the first query, positions of the queries, and positions of the keys."""
    size, first = max(TILE // (heads * min(KEYS, keys)), 1), 0
    for span in spans:
        for start in range(span.start, span.stop, size):
            rows = range(start, min(start + size, span.stop))
            begin = 0 if window is None else max(rows.start - window + 1, 0)
            end = rows.stop if causal or window is not None else keys
            for column in range(begin, end, KEYS):
                yield first, rows, range(column, min(column + KEYS, end))
            first += len(rows)


def _visible(
    rows: range,
    columns: range,
    causal: bool,
    mask: Tensor | None,
    ids: Tensor | None,
    window: int | None,
    device: torch.device,
) -> Tensor | None:
    """Return a mask of the visible (query, key) pairs of a tile, bool [batch or 1, 1, rows, columns].

    None means all pairs are visible.
    """
    inside = [slice(positions.start, positions.stop) for positions in (rows, columns)]
    parts = [] if mask is None else [mask[:, :, *inside]]
    if ids is not None:
        parts.append((ids[:, inside[0], None] == ids[:, None, inside[1]])[:, None])
    later = causal or window is not None
    if (later and columns.stop > rows.start + 1) or (
        window is not None and columns.start <= rows.stop - 1 - window
    ):
        query = torch.arange(rows.start, rows.stop, device=device)[:, None]
        key = torch.arange(columns.start, columns.stop, device=device)
        near = key <= query
        parts.append((near if window is None else near & (key > query - window))[None, None])
    return reduce(and_, parts) if parts else None
