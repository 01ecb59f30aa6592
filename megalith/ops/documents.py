"""Documents that stand one behind the other in a sequence, and attention that stays inside of them.

They are described by where they end: int32 [batch, documents], ascending, `ends[b, d]` the place behind the last token
of document d in sequence b; the last one is the sequence's length. Rows are filled up by repeating it, which means
documents without tokens: their number changes from batch to batch, and what is compiled would be compiled anew.

All that attention asks for comes from the ends, on their device and without waiting for it: the cumulative lengths of
variable-length kernels, or for kernels without such the numbers of the documents and a mask. Some of the tokens, as a
rank of context parallelism has them, keep the description: `ends_in_spans` gives theirs.

ALiBi (Press et al. 2022) biases scores linearly, instead of positions in the embedding or in the heads: the score of a
query with the key n positions before it becomes score − slope · n, with a slope for each head: for 8 heads 1/2, 1/4, …,
1/256, in general 2^(−8·k/heads) for head k = 1, 2, …. Where the heads are no power of two, those beyond one have the
odd powers of twice as many heads', as in the paper's own code and in BLOOM.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.ops.compiled import varies


def query_and_key_ends(ends: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """int32 [batch, documents], of both alike, or of each [2, batch, documents], one by one."""
    if ends is None:
        return None
    return (ends, ends) if ends.dim() == 2 else tuple(ends)


def mark_dynamic_documents(ends: Tensor) -> Tensor:
    """The ends as compiled layers may take them: however many documents there are."""
    varies(ends, 1)
    return ends


def document_ids(ends: Tensor, seq: int) -> Tensor:
    """The number of each token's document: int32 [batch, seq]."""
    places = torch.arange(seq, dtype=ends.dtype, device=ends.device).expand(ends.shape[0], seq)
    return torch.searchsorted(ends.contiguous(), places.contiguous(), right=True, out_int32=True)


def same_document_mask(queries: Tensor, keys: Tensor, causal: bool) -> Tensor:
    """Attention between tokens of the same number: bool [batch, 1, queries, keys] from int [batch, queries] and int
    [batch, keys]."""
    same = queries[:, :, None] == keys[:, None, :]
    return (same.tril() if causal else same)[:, None]


def padding_attention_mask(padding: Tensor) -> Tensor:
    """Causal attention to all but padding, bool [batch, 1, queries, keys] from bool [batch, seq]. A token that has
    nothing else to see sees itself, for kernels differ in what they give without any key."""
    seen = ~padding[:, None, :].expand(-1, padding.shape[1], -1)
    seen = seen.tril()
    itself = torch.eye(padding.shape[1], dtype=torch.bool, device=padding.device)
    return (seen | itself & ~seen.any(-1, keepdim=True))[:, None]


def window_mask(queries: int, keys: int, window: int, device: torch.device, ahead: int = 0) -> Tensor:
    """Causal attention over the last `window` keys, the last query being `ahead` places behind the last key: bool [1,
    1, queries, keys]."""
    places = torch.arange(keys, device=device)
    own = torch.arange(keys - queries, keys, device=device)[:, None] + ahead
    return ((places <= own) & (places > own - window))[None, None]


def dense_mask(
    query: Tensor,  # [batch, heads, queries, head_dim]
    key: Tensor,  # [batch, groups, keys, head_dim]
    mask: Tensor | None,
    documents: tuple[Tensor, Tensor] | None,  # the ends of the queries' documents, and of the keys'
    causal: bool,
    window: int | None,
    ahead: int = 0,  # as window_mask takes it
) -> Tensor | None:
    """All that is said of who sees whom as one mask bool [batch or 1, 1, queries, keys], or None where causal says it
    all. A mask has what is causal in it."""
    queries, keys = query.shape[2], key.shape[2]
    if documents is not None:
        numbers = (document_ids(ends, seq) for ends, seq in zip(documents, (queries, keys), strict=True))
        inside = same_document_mask(*numbers, causal and window is None)
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
    numbers: Tensor | None,  # document_ids of queries and keys alike
    size: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Of the blocks of `size` queries by `size` keys, the queries being the last tokens, those in which a query may see
    a key, and those in which every query sees every key: bool [batch or 1, 1, row blocks, column blocks] each. Nothing
    of [queries, keys] is made."""
    rows = torch.arange(keys - queries, keys, size, device=device)[:, None]
    columns = torch.arange(0, keys, size, device=device)
    row_ends, column_ends = ((x + size).clamp(max=keys) - 1 for x in (rows, columns))
    some = (rows >= 0) & (columns >= 0)
    whole = (row_ends - rows == size - 1) & (column_ends - columns == size - 1)
    if causal or window is not None:
        some, whole = some & (columns <= row_ends), whole & (column_ends <= rows)
    if window is not None:
        some, whole = some & (column_ends > rows - window), whole & (columns > row_ends - window)
    some, whole = some[None], whole[None]
    if numbers is not None:
        low, high = numbers[:, columns], numbers[:, column_ends]  # numbers ascend
        some = some & (low[:, None] <= high[:, :, None]) & (low[:, :, None] <= high[:, None])
        whole = whole & (low[:, :, None] == high[:, None]) & (low[:, None] == high[:, :, None])
    return some[:, None], whole[:, None]


def ends_in_spans(ends: Tensor, spans: Sequence[range]) -> Tensor:
    """The ends among the tokens of these spans alone, one behind the other: int32 [batch, documents]."""
    return sum((ends - span.start).clamp(0, len(span)) for span in spans)


def cumulative_lengths(ends: Tensor, seq: int) -> Tensor:
    """Where each document begins among all tokens of the batch, and the end: int32 [batch · documents + 1]."""
    rows = torch.arange(ends.shape[0], dtype=ends.dtype, device=ends.device)[:, None] * seq
    return torch.nn.functional.pad((ends + rows).flatten(), (1, 0))


def alibi_slopes(heads: int, first: int, count: int, device: torch.device) -> Tensor:
    """Those of `count` heads from number `first` on, of a layer with so many `heads`: float32 [count]."""
    numbers = torch.arange(first, first + count, dtype=torch.float32, device=device)
    power = 1 << heads.bit_length() - 1  # the largest in heads
    further = (numbers - power) * 2 + 1
    return torch.exp2(torch.where(numbers < power, (numbers + 1) * (-8 / power), further * (-4 / power)))


def alibi_bias(slopes: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """What is added to the scores, float32 [heads, queries, keys]; places in the sequence, int [queries] and [keys]."""
    return slopes[:, None, None] * (keys - queries[:, None])
