"""Attention that sums over keys in a fixed order, for prefill and decode and for padded and packed rows.

A query takes the keys of its document in blocks of KEYS, counted from the document's first key, with an online softmax
(Milakov and Gimelshein 2018; Dao et al. 2022). A block that the query does not see multiplies the running sums by 1 and
adds 0, so it changes no bit. The result therefore depends neither on a row's padding nor on how much of a cache is
filled.

The backward pass is the one in ops/block_attention.py, from the output and its log-sum-exp.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from megalith.errors import ConfigError
from megalith.ops import kernels
from megalith.ops.batch_invariant.elementwise import by_whole_vectors, sum_by_halves
from megalith.ops.batch_invariant.matmul import COLUMNS
from megalith.ops.block_attention import block_attention_backward
from megalith.ops.documents import document_ids
from megalith.ops.permute import index_in_group

if kernels.AVAILABLE:
    from megalith.ops.kernels.batch_invariant_kernels import tiled_attention
    from megalith.ops.kernels.decode_kernel import write_to_cache

ROWS, KEYS = 32, 32  # queries and keys per matmul on a CPU
MULTIPLE = 8  # head_dim of the backward pass on a GPU


def attention(
    query: Tensor,  # [batch, seq, heads, head_dim]
    key: Tensor,  # [batch, seq, groups, head_dim]
    value: Tensor,  # [batch, seq, groups, head_dim]
    *,
    mask: Tensor | None = None,
    documents: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    **unsupported,
) -> Tensor:
    """Return causal attention as ops.attention_core.attention does, [batch, seq, heads, head_dim].

    A mask must be a mask of documents or of padding: each query sees the keys from some first key up to its own. Other
    arguments of that function are rejected by the configuration's rules.
    """
    refused = [name for name, value in unsupported.items() if name not in _IGNORED and value]
    if refused:
        raise ConfigError(
            f"batch-invariant attention does not support {refused[0]}; set train.batch_invariant and rl.exact to "
            "false"
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    window = None if window is None or window >= key.shape[1] else window
    starts = first_keys(query.shape[1], mask, documents)
    return _Attention.apply(query, key, value, starts, mask, documents, window, scale)


_IGNORED = {
    "causal",
    "first_head",
    "dropout_rows",
    "saved",
}  # always causal; the others have no effect in Megalith


def first_keys(seq: int, mask: Tensor | None, documents: Tensor | None) -> Tensor | None:
    """Return the index of the first key of each query's document, int64 [batch, seq].

    None if that is the row's first key.

    `mask` is bool [batch, 1, seq, seq], `documents` int32 [batch, documents] as in ops/documents.py.
    """
    if mask is not None:
        starts = mask[:, 0].int().argmax(-1)
        index = torch.arange(seq, device=mask.device)
        if not mask.is_cuda:
            expected = (index >= starts[..., None]) & (index <= index[:, None])
            if not torch.equal(expected, mask[:, 0].expand_as(expected)):
                raise ConfigError(
                    "batch-invariant attention supports only document masks and padding at the start or end of a "
                    "sequence, but this mask hides other keys; set train.batch_invariant and rl.exact to false"
                )
        return starts
    if documents is None:
        return None
    bounds = pad(documents, (1, 0)).long()
    return bounds.gather(1, document_ids(documents, seq).long())


def cached_attention(
    query: Tensor,  # [rows, 1, heads, head_dim]
    key: Tensor,  # [rows, 1, groups, head_dim]
    value: Tensor,  # [rows, 1, groups, head_dim]
    cache: Tensor,  # [2, rows, room, groups, head_dim]
    positions: Tensor,  # int64 [rows]
    visible: Tensor | None,
    *,
    window: int | None,
    scale: float | None,
    **_unsupported,
) -> Tensor:
    """Cache the key and value of a new token per row, and compute its attention like
    ops.cached_attention.cached_attention.
    """
    if query.is_cuda:
        key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (key, value))
        positions = positions.contiguous()  # a column of several tokens' positions is not
        write_to_cache(key[:, 0], value[:, 0], cache, positions)
    else:
        rows, room = cache.shape[1:3]
        new = torch.arange(0, rows * room, room, device=positions.device) + positions
        for cached, x in zip(cache, (key, value)):
            cached.flatten(0, 1).index_copy_(0, new, x[:, 0])
    keys, values = cache if visible is None else cache[:, :, : visible.shape[1]]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return attend(query, keys, values, positions[:, None], None, window, scale)[0]


def continued_attention(
    query: Tensor,  # [rows, seq, heads, head_dim]
    key: Tensor,  # [rows, keys, groups, head_dim]
    value: Tensor,  # [rows, keys, groups, head_dim]
    positions: Tensor,  # int64 [rows, seq]
    *,
    window: int | None,
    scale: float | None,
    **_unsupported,
) -> Tensor:
    """Compute the attention of tokens that follow cached ones, like ops.cached_attention.continued_attention."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return attend(query, key, value, positions, None, window, scale)[0]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    starts: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return attention and the log-sum-exp of its scores, without a gradient.

    Args:
        query: [batch, queries, heads, head_dim].
        key: [batch, keys, groups, head_dim].
        value: [batch, keys, groups, head_dim].
        positions: int64 [batch, queries], index of the last key that a query sees.
        starts: int64 [batch, queries], index of the first key that a query sees; unused with a window. None means 0.
        window: maximum number of keys that a query sees.
        scale: factor of the scores.

    Returns:
        [batch, queries, heads, head_dim] in the query's dtype, and float32 [batch, heads, queries].
    """
    if query.is_cuda:
        return tiled_attention(query, key, value, positions, starts, window, scale)
    dtype = query.dtype
    query, key, value = (x.float() for x in (query, key, value))
    if starts is None:
        out, lse = _by_blocks(query, key, value, positions, window, scale)
        return out.to(dtype), lse
    # One row per document that has queries, with its keys from the first one on.
    batch, seq = key.shape[:2]
    row_starts = torch.arange(0, batch * seq, seq, device=query.device)[:, None]
    begins, number = torch.unique((row_starts + starts).flatten(), return_inverse=True)
    order = number.argsort(stable=True)
    slot = torch.empty_like(number)
    slot[order] = index_in_group(number[order], len(begins))
    offset = (positions - starts).flatten()
    last = begins.new_zeros(len(begins)).scatter_reduce_(0, number, offset, "amax")
    keys = torch.arange(int(last.max()) + 1, device=query.device)
    index = (begins[:, None] + keys).clamp(max=batch * seq - 1)

    def by_document(x: Tensor) -> Tensor:
        rows = x.new_zeros(len(begins), int(slot.max()) + 1, *x.shape[1:])
        rows[number, slot] = x
        return rows

    queries, inside = by_document(query.flatten(0, 1)), by_document(offset)
    of_documents = (x.flatten(0, 1)[index] for x in (key, value))
    out, lse = _by_blocks(queries, *of_documents, inside, window, scale)
    lse = lse.transpose(1, 2)[number, slot].unflatten(0, starts.shape).transpose(1, 2)
    return out[number, slot].unflatten(0, starts.shape).to(dtype), lse


def _by_blocks(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute `attend` in fp32 for keys that begin at 0. Every matmul has ROWS queries and KEYS keys."""
    batch, queries, heads, size = query.shape
    groups = key.shape[2]
    in_group = heads // groups
    rows = (
        query.unflatten(2, (groups, in_group)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    )  # [batch, groups, rows, size]
    filling = -rows.shape[2] % ROWS
    tiles = (rows.shape[2] + filling) // ROWS
    rows = pad(rows, (0, 0, 0, filling)).reshape(-1, ROWS, size)  # [batch · groups · tiles, ROWS, size]
    positions = pad(positions.repeat_interleave(in_group, 1), (0, filling)).view(batch, 1, tiles, ROWS, 1)
    positions = positions.expand(-1, groups, -1, -1, -1).reshape(-1, ROWS, 1)
    key, value = (pad(x, (0, 0, 0, 0, 0, -x.shape[1] % KEYS)).transpose(1, 2) for x in (key, value))
    value = pad(value, (0, -size % COLUMNS))

    def block(x: Tensor, first: int) -> Tensor:
        part = x[:, :, None, first : first + KEYS].expand(-1, -1, tiles, -1, -1)
        return part.reshape(-1, KEYS, x.shape[-1])  # [batch · groups · tiles, KEYS, size]

    largest = rows.new_full((len(rows), ROWS, 1), float("-inf"))
    total, out = torch.zeros_like(largest), rows.new_zeros(*rows.shape[:2], value.shape[-1])
    for first in range(0, int(positions.max()) + 1, KEYS):
        number = torch.arange(first, first + KEYS, device=rows.device)
        seen = number <= positions
        if window is not None:
            seen = seen & (number > positions - window)
        scores = torch.bmm(rows, block(key, first).mT).mul_(scale).masked_fill_(~seen, float("-inf"))
        highest = torch.maximum(largest, scores.amax(-1, keepdim=True))
        base = highest.masked_fill(highest == float("-inf"), 0.0)
        weights = by_whole_vectors(torch.exp, scores - base)
        decay = by_whole_vectors(torch.exp, largest - base)
        total = total * decay + sum_by_halves(weights)[..., None]
        out = out * decay + torch.bmm(weights, block(value, first))
        largest = highest
    lse = largest + by_whole_vectors(torch.log, total)

    def by_query(x: Tensor) -> Tensor:
        x = x.reshape(batch, groups, tiles * ROWS, -1)[:, :, : queries * in_group]
        return x.unflatten(2, (queries, in_group)).permute(0, 2, 1, 3, 4).flatten(2, 3)

    return by_query(out[..., :size] / total), by_query(lse)[..., 0].transpose(1, 2)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: Tensor | None,
        mask: Tensor | None,
        documents: Tensor | None,
        window: int | None,
        scale: float,
    ) -> Tensor:
        positions = torch.arange(query.shape[1], device=query.device).expand(len(query), -1)
        out, lse = attend(query, key, value, positions, starts, window, scale)
        ctx.save_for_backward(query, key, value, out, lse, mask, documents)
        ctx.plain = mask is None, window, scale
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        *tensors, lse, mask, documents = ctx.saved_tensors
        size = grad.shape[3]
        filling = -size % MULTIPLE if grad.is_cuda else 0  # zeros change nothing
        grad, query, key, value, out = (pad(x, (0, filling)).transpose(1, 2) for x in (grad, *tensors))
        gradients = block_attention_backward(
            grad, query, key, value, out, lse.contiguous(), mask, documents, *ctx.plain
        )
        return *(x.transpose(1, 2)[..., :size] for x in gradients), *[None] * 5
