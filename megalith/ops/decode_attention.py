"""Attention of generation: one new token a row, over what a static cache has of the tokens before it.

On a GPU by a kernel that reads no more of the cache than is filled (kernels/decode_kernel.py). On a CPU by torch's,
over the longest row's length: the query heads of a group stand as the queries of one head, so that keys are not
repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.ops import kernels
from megalith.ops.attention_core import attention

if kernels.AVAILABLE:
    from megalith.ops.kernels.decode_kernel import decode_attention


def cached_attention(
    query: Tensor,  # [rows, 1, heads, head_dim]
    key: Tensor,  # [rows, 1, groups, head_dim]
    value: Tensor,  # [rows, 1, groups, head_dim]
    cache: Tensor,  # [2, rows, room, groups, head_dim]: keys and values, to which those of the new token are added
    places: Tensor,  # int64 [rows]: of the new tokens; a row sees everything up to its own
    seen: Tensor | None,  # what `seen_places` gives; on a GPU it is not looked at
    *,
    window: int | None,
    softcap: float | None,
    scale: float | None,
) -> Tensor:
    """[rows, 1, heads, head_dim]"""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if query.is_cuda and kernels.AVAILABLE:
        new = (x[:, 0] for x in (query, key, value))
        return decode_attention(*new, cache, places, window or 0, softcap or 0.0, scale)[:, None]
    rows, room = cache.shape[1:3]
    new = torch.arange(0, rows * room, room, device=places.device) + places
    for cached, x in zip(cache, (key, value)):
        cached.flatten(0, 1).index_copy_(0, new, x[:, 0])
    if window is not None:
        seen = seen & (torch.arange(seen.shape[1], device=places.device) > places[:, None] - window)
    groups = (
        query[:, 0].unflatten(1, (key.shape[2], -1)).transpose(1, 2)
    )  # [rows, in group, groups, head_dim]
    mask = seen[:, None, None].expand(-1, 1, groups.shape[1], -1)
    filled = cache[:, :, : seen.shape[1]]
    out = attention(groups, filled[0], filled[1], causal=False, mask=mask, softcap=softcap, scale=scale)
    return out.transpose(1, 2).flatten(1, 2)[:, None]


def seen_places(places: Tensor, longest: int) -> Tensor | None:
    """Which of the first `longest` places each row of `places` int64 [rows] sees: bool [rows, longest]; None where the
    kernel finds out by itself."""
    if places.is_cuda and kernels.AVAILABLE:
        return None
    return torch.arange(longest, device=places.device) <= places[:, None]
