"""Documents packed in a sequence: attention masks and lengths within documents, and ALiBi biases.

Documents are described by their ends: int32 [batch, documents], ascending; `ends[b, d]` is the exclusive end of
document d in sequence b, the last one the sequence length. Rows are padded to the same number of documents by repeating
the sequence length, which adds empty documents. Otherwise code would be recompiled whenever the number of documents
changes.

Attention derives what a kernel needs from the ends on their device, without waiting: cumulative lengths for
variable-length kernels, or document numbers and a mask for others. `ends_in_spans` returns the ends within the tokens
of a context-parallel rank.

ALiBi (Press et al. 2022) subtracts slope · n from the score of the key n positions earlier, with slope 2^(−8·k/heads)
for head k = 1, 2, …. If the number of heads is not a power of two, the remaining heads use the odd powers of twice as
many heads, as in the paper's code and in BLOOM.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.ops.compiled import mark_dynamic


def query_and_key_ends(ends: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Return the ends of queries and of keys, from int32 [batch, documents] for both, or [2, batch, documents]."""
    if ends is None:
        return None
    return (ends, ends) if ends.dim() == 2 else tuple(ends)


def mark_dynamic_documents(ends: Tensor) -> Tensor:
    """Let compiled layers accept any number of documents."""
    mark_dynamic(ends, 1)
    return ends


def document_ids(ends: Tensor, seq: int) -> Tensor:
    """Return the document number of each token, int32 [batch, seq]."""
    positions = torch.arange(seq, dtype=ends.dtype, device=ends.device).expand(ends.shape[0], seq)
    return torch.searchsorted(ends.contiguous(), positions.contiguous(), right=True, out_int32=True)


def chunk_ends(ends: Tensor, size: int, length: int) -> Tensor:
    """Split each document into chunks of `size` tokens.

    Returns the ends of the chunks, int32 [batch, documents · chunks].

    Args:
        ends: ends of the documents, int32 [batch, documents].
        size: length of a chunk, counted from the start of its document.
        length: length of a sequence.
    """
    starts = torch.nn.functional.pad(ends[:, :-1], (1, 0))
    steps = torch.arange(1, -(-length // size) + 1, dtype=ends.dtype, device=ends.device) * size
    return torch.minimum(starts[..., None] + steps, ends[..., None]).flatten(1)


def same_document_mask(queries: Tensor, keys: Tensor, causal: bool) -> Tensor:
    """Return a mask of (query, key) pairs in the same document, bool [batch, 1, queries, keys].

    Arguments are document numbers, int [batch, queries] and [batch, keys].
    """
    same = queries[:, :, None] == keys[:, None, :]
    return (same.tril() if causal else same)[:, None]


def padding_attention_mask(padding: Tensor) -> Tensor:
    """Return the causal mask that excludes padding, bool [batch, 1, queries, keys].

    `padding` is bool [batch, seq], True for padding. A token without any visible key sees itself, because kernels
    disagree about rows without keys.
    """
    visible = ~padding[:, None, :].expand(-1, padding.shape[1], -1)
    visible = visible.tril()
    diagonal = torch.eye(padding.shape[1], dtype=torch.bool, device=padding.device)
    return (visible | diagonal & ~visible.any(-1, keepdim=True))[:, None]


def window_mask(queries: int, keys: int, window: int, device: torch.device, ahead: int = 0) -> Tensor:
    """Return the causal mask of the last `window` keys, bool [1, 1, queries, keys].

    The last query is `ahead` positions after the last key.
    """
    key = torch.arange(keys, device=device)
    query = torch.arange(keys - queries, keys, device=device)[:, None] + ahead
    return ((key <= query) & (key > query - window))[None, None]


def dense_mask(
    query: Tensor,  # [batch, heads, queries, head_dim]
    key: Tensor,  # [batch, groups, keys, head_dim]
    mask: Tensor | None,
    documents: tuple[Tensor, Tensor] | None,  # ends of the queries' documents, and of the keys'
    causal: bool,
    window: int | None,
    ahead: int = 0,  # see window_mask
) -> Tensor | None:
    """Combine mask, documents, causality and window into one mask, bool [batch or 1, 1, queries, keys].

    `mask`, if passed, already includes causality. Returns None if causality suffices.
    """
    queries, keys = query.shape[2], key.shape[2]
    if documents is not None:
        document_numbers = (
            document_ids(ends, seq) for ends, seq in zip(documents, (queries, keys), strict=True)
        )
        inside = same_document_mask(*document_numbers, causal and window is None)
        mask = inside if mask is None else mask & inside
    if window is not None:
        near = window_mask(queries, keys, window, query.device, ahead)
        mask = near if mask is None else mask & near
    return mask


def visible_blocks(
    queries: int,
    keys: int,
    causal: bool,
    window: int | None,
    document_numbers: Tensor | None,  # document_ids of both queries and keys
    size: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return the blocks of `size` queries and `size` keys that are partly or completely visible.

    No tensor of shape [queries, keys] is allocated. The queries are the last tokens.

    Returns:
        Blocks with at least one visible pair, bool [batch or 1, 1, row blocks, column blocks].
        Blocks in which every pair is visible, of the same shape.
    """
    rows = torch.arange(keys - queries, keys, size, device=device)[:, None]
    columns = torch.arange(0, keys, size, device=device)
    row_ends, column_ends = ((x + size).clamp(max=keys) - 1 for x in (rows, columns))
    partial = (rows >= 0) & (columns >= 0)
    complete = (row_ends - rows == size - 1) & (column_ends - columns == size - 1)
    if causal or window is not None:
        partial, complete = partial & (columns <= row_ends), complete & (column_ends <= rows)
    if window is not None:
        partial, complete = partial & (column_ends > rows - window), complete & (columns > row_ends - window)
    partial, complete = partial[None], complete[None]
    if document_numbers is not None:
        low, high = document_numbers[:, columns], document_numbers[:, column_ends]  # numbers ascend
        partial = partial & (low[:, None] <= high[:, :, None]) & (low[:, :, None] <= high[:, None])
        complete = complete & (low[:, :, None] == high[:, None]) & (low[:, None] == high[:, :, None])
    return partial[:, None], complete[:, None]


def ends_in_spans(ends: Tensor, spans: Sequence[range]) -> Tensor:
    """Return the ends of documents within these spans of tokens, as indices into the concatenated spans: int32 [batch,
    documents].
    """
    return sum((ends - span.start).clamp(0, len(span)) for span in spans)


def cumulative_lengths(ends: Tensor, seq: int) -> Tensor:
    """Return the start of each document in the flattened batch, and the end of the last: int32 [batch · documents +
    1].
    """
    rows = torch.arange(ends.shape[0], dtype=ends.dtype, device=ends.device)[:, None] * seq
    return torch.nn.functional.pad((ends + rows).flatten(), (1, 0))


def alibi_slopes(heads: int, first: int, count: int, device: torch.device) -> Tensor:
    """Return the slopes of `count` heads, starting at head `first` of `heads`: float32 [count]."""
    document_numbers = torch.arange(first, first + count, dtype=torch.float32, device=device)
    power = 1 << heads.bit_length() - 1  # largest power of two in heads
    further = (document_numbers - power) * 2 + 1
    return torch.exp2(
        torch.where(document_numbers < power, (document_numbers + 1) * (-8 / power), further * (-4 / power))
    )


def alibi_bias(slopes: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return the bias on the scores, float32 [heads, queries, keys], from positions int [queries] and [keys]."""
    return slopes[:, None, None] * (keys - queries[:, None])
