"""Attention of new tokens over cached keys and values, for generation.

For one new token per row, a kernel on a GPU reads only the filled part of the cache (kernels/decode_kernel.py). On a
CPU, the query heads of a group become the queries of one head, so that keys need not be repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.ops import kernels
from megalith.ops.attention_core import attention, plain_attention
from megalith.ops.attention_sink import merge_sink
from megalith.ops.block_attention import block_attention
from megalith.ops.documents import alibi_slopes

if kernels.AVAILABLE:
    from megalith.ops.kernels.decode_kernel import decode_attention


def cached_attention(
    query: Tensor,  # [rows, 1, heads, head_dim]
    key: Tensor,  # [rows, 1, groups, head_dim]
    value: Tensor,  # [rows, 1, groups, head_dim]
    cache: Tensor,  # [2, rows, room, groups, head_dim]: keys and values; those of the new token are added
    positions: Tensor,  # int64 [rows]: positions of the new tokens; a row sees all up to its own
    visible: Tensor | None,  # from `visible_positions`; not used on a GPU
    *,
    window: int | None,
    softcap: float | None,
    scale: float | None,
    sink: Tensor | None = None,
    alibi: int | None = None,  # as in `attention`
    first_head: int = 0,
    chunk: int | None = None,  # length of the chunks that attention stays within; not with a window
) -> Tensor:
    """Write the key and value of one new token per row to the cache. Returns the token's attention over the cache.

    Returns [rows, 1, heads, head_dim].
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if query.is_cuda and kernels.AVAILABLE and sink is None and alibi is None:
        new = (x[:, 0] for x in (query, key, value))
        out = decode_attention(*new, cache, positions, window or 0, softcap or 0.0, scale, chunk or 0)
        return out[:, None]
    rows, room = cache.shape[1:3]
    new = torch.arange(0, rows * room, room, device=positions.device) + positions
    for cached, x in zip(cache, (key, value)):
        cached.flatten(0, 1).index_copy_(0, new, x[:, 0])
    if visible is None:
        visible = torch.arange(room, device=positions.device) <= positions[:, None]
    if window is not None:
        keys = torch.arange(visible.shape[1], device=positions.device)
        visible = visible & (keys > positions[:, None] - window)
    if chunk is not None:
        keys = torch.arange(visible.shape[1], device=positions.device)
        visible = visible & (keys // chunk == positions[:, None] // chunk)
    # The query heads of a group become queries: [rows, in group, groups, head_dim].
    groups = query[:, 0].unflatten(1, (key.shape[2], -1)).transpose(1, 2)
    mask = visible[:, None, None].expand(-1, 1, groups.shape[1], -1)
    filled = cache[:, :, : visible.shape[1]]
    if sink is not None:
        inputs = (x.transpose(1, 2) for x in (groups, *filled))
        results = block_attention(*inputs, mask, None, False, None, scale)
        out = merge_sink(*results, sink.view(key.shape[2], -1))[0]
        return out.flatten(1, 2)[:, None]
    if alibi is not None:
        slopes = alibi_slopes(alibi, first_head, query.shape[2], query.device).view(key.shape[2], -1, 1)
        distances = torch.arange(visible.shape[1], device=positions.device) - positions[:, None]
        bias = slopes * distances[:, None, None]  # [rows, groups, in group, keys]
        inputs = (x.transpose(1, 2) for x in (groups, *filled))
        out = plain_attention(*inputs, False, mask, softcap, scale, 0.0, None, first_head, bias=bias)
        return out.flatten(1, 2)[:, None]
    out = attention(groups, filled[0], filled[1], causal=False, mask=mask, softcap=softcap, scale=scale)
    return out.transpose(1, 2).flatten(1, 2)[:, None]


def continued_attention(
    query: Tensor,  # [rows, seq, heads, head_dim]
    key: Tensor,  # [rows, keys, groups, head_dim]: of the sequence from its first token
    value: Tensor,  # [rows, keys, groups, head_dim]
    positions: Tensor,  # int64 [rows, seq]: of the queries; each sees all keys up to its own
    *,
    window: int | None,
    softcap: float | None,
    scale: float | None,
    sink: Tensor | None = None,
    chunk: int | None = None,  # as in `cached_attention`
) -> Tensor:
    """Compute the attention of new tokens over the keys of earlier tokens and their own keys.

    `key` and `value` contain the earlier tokens first. Returns [rows, seq, heads, head_dim].
    """
    keys = torch.arange(key.shape[1], device=positions.device)
    visible = keys <= positions[..., None]
    if window is not None:
        visible &= keys > positions[..., None] - window
    if chunk is not None:
        visible &= keys // chunk == positions[..., None] // chunk
    seen = dict(mask=visible[:, None], softcap=softcap, scale=scale, sink=sink)
    return attention(query, key, value, causal=False, **seen)


def visible_positions(positions: Tensor, longest: int) -> Tensor | None:
    """Return a mask of the cache positions that each row sees, bool [rows, longest]. `positions`, int64 [rows], are
    those of the new tokens.

    Returns None if the kernel determines visibility itself.
    """
    if positions.is_cuda and kernels.AVAILABLE:
        return None
    return torch.arange(longest, device=positions.device) <= positions[:, None]
