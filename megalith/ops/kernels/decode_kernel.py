"""Attention of one new token per row over a KV cache with rows of different lengths.

     cache [2, rows, room, groups, head_dim]: keys, values          positions [rows]: position of the new token

A first kernel writes the new keys and values. Then each program computes the query heads of one group of a row for a
split of the filled keys. It reads their number on the device, so that one CUDA graph serves every length, and never
reads unfilled memory. With several splits, a last kernel combines them (flash-decoding; Dao et al. 2023). The query
heads of a group are the rows of one matmul, so that keys need not be repeated.
"""

from __future__ import annotations

from math import log2

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS, MAX_SPLITS = 528, 32  # 4 on each SM of an H200
TILE_BYTES = 2**14  # keys per tile
MIN_QUERIES = 16  # minimum rows of a matmul on tensor cores
_LOG2_E = tl.constexpr(log2(2.718281828459045))


@triton.jit
def _write(
    key, value, cache, positions, key_row, key_head, value_row, value_head, cache_half, cache_row, cache_token,
    COLUMNS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < COLUMNS
    head, dim = columns // SIZE, columns % SIZE
    target = cache + row * cache_row + tl.load(positions + row) * cache_token + columns
    new_key = tl.load(key + row * key_row + head * key_head + dim, mask=inside)
    new_value = tl.load(value + row * value_row + head * value_head + dim, mask=inside)
    tl.store(target, new_key, mask=inside)
    tl.store(target + cache_half, new_value, mask=inside)


@triton.jit
def _attend(
    query, cache, positions, out, stats, scale, softcap, window, chunk,
    query_row, query_head, cache_half, cache_row, cache_token,
    HEADS: tl.constexpr, IN_GROUP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, SPLITS: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    row, group, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    count = tl.load(positions + row).to(tl.int32) + 1
    first = 0
    if WINDOWED:
        first = tl.maximum(count - window, 0)
    if CHUNKED:
        first = (count - 1) // chunk * chunk
    share = tl.cdiv(tl.cdiv(count - first, SPLITS), KEYS) * KEYS
    begin = first + split * share
    end = tl.minimum(begin + share, count)
    queries, dims, keys = tl.arange(0, QUERIES), tl.arange(0, WIDTH), tl.arange(0, KEYS)
    heads = group * IN_GROUP + queries
    valid_queries = (queries < IN_GROUP)[:, None] & (dims < SIZE)[None, :]
    q = tl.load(
        query + row * query_row + heads[:, None] * query_head + dims[None, :], mask=valid_queries, other=0.0
    )
    cached = cache + row * cache_row + group * SIZE + dims[None, :]
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    summed = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in tl.range(begin, end, KEYS):
        inside = start + keys < end
        valid = inside[:, None] & (dims < SIZE)[None, :]
        pointers = cached + (start + keys).to(tl.int64)[:, None] * cache_token
        k = tl.load(pointers, mask=valid, other=0.0)  # [keys, head_dim]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if CAPPED:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        scores = tl.where(inside[None, :], scores * _LOG2_E, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        v = tl.load(pointers + cache_half, mask=valid, other=0.0)
        summed = summed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        total = total * shrink + tl.sum(weights, 1)
        largest = new_largest
    index = (row * HEADS + heads) * SPLITS + split
    pointers = out + index[:, None] * SIZE + dims[None, :]
    if SPLITS == 1:
        tl.store(pointers, (summed / total[:, None]).to(out.dtype.element_ty), mask=valid_queries)
    else:
        tl.store(pointers, summed, mask=valid_queries)
        tl.store(stats + index * 2, largest, mask=queries < IN_GROUP)
        tl.store(stats + index * 2 + 1, total, mask=queries < IN_GROUP)


@triton.jit
def _combine(parts, stats, out, SIZE: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    splits, dims = head * SPLITS + tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    largest, total = tl.load(stats + splits * 2), tl.load(stats + splits * 2 + 1)
    factors = tl.exp2(largest - tl.max(largest, 0))  # 0 for a split without keys
    summed = tl.load(parts + splits[:, None] * SIZE + dims[None, :], mask=(dims < SIZE)[None, :], other=0.0)
    result = tl.sum(summed * factors[:, None], 0) / tl.sum(total * factors, 0)
    tl.store(out + head * SIZE + dims, result.to(out.dtype.element_ty), mask=dims < SIZE)


def write_to_cache(key: Tensor, value: Tensor, cache: Tensor, positions: Tensor) -> None:
    """Write a key and a value per row, [rows, groups, head_dim], at `positions`, int64 [rows], of the cache.

    The positions are contiguous, and each key and value is consecutive along head_dim.
    """
    rows, groups, size = key.shape
    _write[(rows,)](
        key, value, cache, positions, *key.stride()[:2], *value.stride()[:2], *cache.stride()[:3],
        COLUMNS=groups * size, SIZE=size, WIDTH=triton.next_power_of_2(groups * size),
    )  # fmt: skip


@torch.library.custom_op("megalith::decode_attention", mutates_args=("cache",))
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Tensor,
    positions: Tensor,
    window: int,
    softcap: float,
    scale: float,
    chunk: int,
) -> Tensor:
    """Compute the attention of one new token per row over the cache, [rows, heads, head_dim].

    query is [rows, heads, head_dim], key and value are [rows, groups, head_dim], positions int64 [rows], and the cache
    is as above. `window`, `softcap` and `chunk` are 0 if not used. `chunk` is the length of the chunks of positions
    within which attention stays.
    """
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    positions = positions.contiguous()  # a column of several tokens' positions is not
    (rows, heads, size), groups = query.shape, key.shape[1]
    width, in_group = triton.next_power_of_2(size), heads // groups
    write_to_cache(key, value, cache, positions)
    splits = min(triton.next_power_of_2(triton.cdiv(PROGRAMS, rows * groups)), MAX_SPLITS)
    out = torch.empty(rows, heads, size, dtype=query.dtype, device=query.device)
    parts, stats = out, out
    if splits > 1:
        parts = torch.empty(rows, heads, splits, size, dtype=torch.float32, device=query.device)
        stats = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=query.device)
    _attend[(rows, groups, splits)](
        query, cache, positions, parts, stats, scale, softcap, window, chunk, *query.stride()[:2], *cache.stride()[:3],
        HEADS=heads, IN_GROUP=in_group, SIZE=size, WIDTH=width,
        QUERIES=max(triton.next_power_of_2(in_group), MIN_QUERIES),
        KEYS=max(min(TILE_BYTES // (width * cache.itemsize), 64), 16), SPLITS=splits,
        CAPPED=softcap > 0, WINDOWED=window > 0, CHUNKED=chunk > 0, PRECISION="ieee", num_warps=4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _combine[(rows * heads,)](parts, stats, out, size, width, splits, num_warps=1)
    return out


@decode_attention.register_fake
def _(query, key, value, cache, positions, window, softcap, scale, chunk):
    return query.new_empty(query.shape)
