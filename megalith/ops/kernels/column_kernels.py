"""Sums over rows in fp32, in one pass over memory: of gradients that are made element by element, over the tokens for a
bias; and of what several ranks have sent.

A program makes some columns of some rows and sums the columns as it goes; the programs' sums are added afterwards, in
a fixed order.

The local part of Ulysses' all-to-all by copy engines, in one pass over memory
(parallel/overlap/copy_engine_heads.py).

A program copies some columns of some tokens of one sequence, for one rank of the axis: into the slot, from which that
rank fetches them, or, where the rank is this one, to their place in the result.
"""

from __future__ import annotations

from math import e, log2

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from megalith.ops.kernels import CUBIC, SLOPE
from megalith.ops.kernels.kernel_launch import Launcher

# Programs in all; ROWS × COLUMNS of a tile; tiles that a program has on their way from memory.
PROGRAMS, ROWS, COLUMNS, WARPS, STAGES = 1056, 8, 1024, 4, 2
QKV_PROGRAMS, QKV_ROWS, QKV_COLUMNS, QKV_WARPS, QKV_STAGES = 528, 8, 512, 4, 3
SUM_ELEMENTS, SUM_WARPS = 2048, 4
_SLOPE, _CUBIC = tl.constexpr(SLOPE), tl.constexpr(CUBIC)
_POWER = tl.constexpr(-SLOPE * log2(e))  # of two, for which the device has an instruction


@triton.jit
def _gelu_backward(
    grad, x, out, parts, tokens,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = columns < WIDTH
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(tokens, ROWS), tl.num_programs(1), num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)[:, None]
        here = (rows < tokens) & inside
        places = rows.to(tl.int64) * WIDTH + columns
        dy = tl.load(grad + places, mask=here, other=0.0).to(tl.float32)
        value = tl.load(x + places, mask=here, other=0.0).to(tl.float32)
        square = value * value
        gate = 1 / (1 + tl.exp2(value * (_POWER + _POWER * _CUBIC * square)))  # gelu_tanh's sigmoid
        slope = gate * (1 + value * (1 - gate) * (_SLOPE + 3 * _SLOPE * _CUBIC * square))
        dx = dy * slope
        tl.store(out + places, dx.to(out.dtype.element_ty), mask=here)
        sums += dx
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(parts + tl.program_id(1) * WIDTH + columns, tl.sum(sums, 0), mask=columns < WIDTH)


@triton_op("megalith::gelu_backward", mutates_args={})
def gelu_backward(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x [tokens, width], `grad` being that of gelu_tanh(x); and its sum over tokens, float32."""
    tokens, width = x.shape
    grad, x = grad.contiguous(), x.contiguous()
    out = torch.empty_like(x)
    blocks = triton.cdiv(width, COLUMNS)
    programs = min(triton.cdiv(PROGRAMS, blocks), triton.cdiv(tokens, ROWS))
    parts = x.new_empty(programs, width, dtype=torch.float32)
    wrap_triton(_gelu_backward)[(blocks, programs)](
        grad, x, out, parts, tokens, WIDTH=width, ROWS=ROWS, COLUMNS=COLUMNS, STAGES=STAGES, num_warps=WARPS
    )
    return out, parts.sum(0)


@triton.jit
def _join_qkv(
    query, key, value, out, parts, tokens, seq,
    query_batch, query_token, query_head, key_batch, key_token, key_head, value_batch, value_token, value_head,
    WIDTH: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    head, place = columns // SIZE, columns % SIZE
    group, head = head // (QUERIES + 2), head % (QUERIES + 2)
    inside = columns < WIDTH
    of_query = inside & (head < QUERIES)
    of_key = inside & (head == QUERIES)
    of_value = inside & (head == QUERIES + 1)
    query += (group * QUERIES + head) * query_head + place
    key += group * key_head + place
    value += group * value_head + place
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(tokens, ROWS), tl.num_programs(1), num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)[:, None]
        valid = rows < tokens
        batch, token = (rows // seq).to(tl.int64), (rows % seq).to(tl.int64)
        q = tl.load(query + batch * query_batch + token * query_token, mask=valid & of_query, other=0.0)
        k = tl.load(key + batch * key_batch + token * key_token, mask=valid & of_key, other=0.0)
        v = tl.load(value + batch * value_batch + token * value_token, mask=valid & of_value, other=0.0)
        joined = tl.where(of_query, q, tl.where(of_key, k, v))
        tl.store(out + rows.to(tl.int64) * WIDTH + columns, joined, mask=valid & inside)
        sums += joined.to(tl.float32)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(parts + tl.program_id(1) * WIDTH + columns, tl.sum(sums, 0), mask=columns < WIDTH)


@triton_op("megalith::join_qkv", mutates_args={})
def join_qkv(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Heads of queries [batch, seq, heads, size] and of keys and values [batch, seq, groups, size], put side by side
    as linear_qkv's rows stand: [batch · seq, groups · (heads / groups + 2) · size]; and the sum over tokens, float32.
    """
    batch, seq, heads, size = query.shape
    groups = key.shape[2]
    query, key, value = (t if t.stride(3) == 1 else t.contiguous() for t in (query, key, value))
    tokens, width = batch * seq, (heads + 2 * groups) * size
    out = query.new_empty(tokens, width)
    blocks = triton.cdiv(width, QKV_COLUMNS)
    programs = min(triton.cdiv(QKV_PROGRAMS, blocks), triton.cdiv(tokens, QKV_ROWS))
    parts = query.new_empty(programs, width, dtype=torch.float32)
    wrap_triton(_join_qkv)[(blocks, programs)](
        query, key, value, out, parts, tokens, seq, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        WIDTH=width, QUERIES=heads // groups, SIZE=size, ROWS=QKV_ROWS, COLUMNS=QKV_COLUMNS, STAGES=QKV_STAGES,
        num_warps=QKV_WARPS,
    )  # fmt: skip
    return out, parts.sum(0)


HEADS_ROWS, HEADS_COLUMNS, HEADS_WARPS = 64, 128, 4  # of a tile: 16 KB in bf16


@triton.jit
def _share_heads(
    first, second, third, slot, out, seq, rank,
    first_batch, first_token, first_head, second_batch, second_token, second_head, third_batch, third_token, third_head,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    RANKS: tl.constexpr, TO_HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    firsts: tl.constexpr = (FIRST + COLUMNS - 1) // COLUMNS
    seconds: tl.constexpr = (SECOND + COLUMNS - 1) // COLUMNS
    thirds: tl.constexpr = (THIRD + COLUMNS - 1) // COLUMNS
    width: tl.constexpr = FIRST + SECOND + THIRD
    share = tl.program_id(0) // (firsts + seconds + thirds)
    block = tl.program_id(0) % (firsts + seconds + thirds)
    if block < firsts:
        _copy(
            first, slot, out, first_batch, first_token, first_head, seq, rank, share, block,
            FIRST, 0, width, GROUPS, SIZE, RANKS, TO_HEADS, ROWS, COLUMNS,
        )  # fmt: skip
    elif THIRD > 0:
        if block < firsts + seconds:
            _copy(
                second, slot, out, second_batch, second_token, second_head, seq, rank, share, block - firsts,
                SECOND, FIRST, width, GROUPS, SIZE, RANKS, TO_HEADS, ROWS, COLUMNS,
            )  # fmt: skip
        else:
            _copy(
                third, slot, out, third_batch, third_token, third_head, seq, rank, share,
                block - firsts - seconds,
                THIRD, FIRST + SECOND, width, GROUPS, SIZE, RANKS, TO_HEADS, ROWS, COLUMNS,
            )  # fmt: skip


@triton.jit
def _copy(
    x, slot, out, by_batch, by_token, by_head, seq, rank, share, block,
    COUNT: tl.constexpr, BEFORE: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    RANKS: tl.constexpr, TO_HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = block * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tokens = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    batch = tl.program_id(2).to(tl.int64)
    inside = (columns < COUNT) & (tokens < seq)
    head, half = (columns // SIZE).to(tl.int64), seq // 2
    # The place in the whole sequence of a rank's token is that of zigzag.spans.
    if TO_HEADS:
        head += share * (COUNT // SIZE)
        places = tl.where(tokens < half, rank * half, (2 * RANKS - 2 - rank) * half) + tokens
        taken = tokens
    else:
        places = tl.where(tokens < half, share * half, (2 * RANKS - 2 - share) * half) + tokens
        taken = places
    x += batch * by_batch + taken.to(tl.int64) * by_token + head * by_head + columns % SIZE
    value = tl.load(x, mask=inside, other=0.0)
    # In a share the columns stand by group, so many of this tensor in each.
    own: tl.constexpr = COUNT // GROUPS
    columns_there = columns // own * (WIDTH // GROUPS) + BEFORE // GROUPS + columns % own
    if share != rank:
        part = tl.where(share > rank, share - 1, share).to(tl.int64)
        row = (part * tl.num_programs(2) + batch) * seq + tokens
        tl.store(slot + row * WIDTH + columns_there, value, mask=inside)
    elif TO_HEADS:
        row = batch * RANKS * seq + places
        tl.store(out + row * WIDTH + columns_there, value, mask=inside)
    else:
        row = batch * seq + tokens
        tl.store(out + (row * RANKS + rank) * WIDTH + columns_there, value, mask=inside)


_launch = Launcher(_share_heads)


def share_heads(xs: list[Tensor], slot: Tensor, out: Tensor, rank: int, to_heads: bool) -> None:
    """Writes, of one tensor or three, what the other ranks fetch into `slot` and this rank's own share into `out`.

    With `to_heads` xs are this rank's tokens [batch, seq, heads, size] and `out` is [batch, ranks · seq, share of all
    heads, size]; without, xs are [batch, ranks · seq, share of the heads, size] and `out` is [batch, seq, all heads,
    size], the ranks' shares one after the other. `slot` has a part for each of the others, in their order: [ranks - 1,
    batch, seq, share of all heads, size]. Both are contiguous. A share has its heads of the first tensor, then of the
    second, then of the third; without `to_heads` it has them so in each of as many groups as the third has heads.

    With `sums` returns float32 [·, share of all heads · size], whose sum is that of xs over batch and tokens.
    """
    xs = [x if x.stride(3) == 1 else x.contiguous() for x in xs]
    others, batch, seq, _, size = slot.shape
    cut = others + 1 if to_heads else 1
    groups = 1 if to_heads else xs[-1].shape[2]
    widths = [x.shape[2] // cut * size for x in xs] + [0] * (3 - len(xs))
    first, second, third = (xs * 3)[:3]
    blocks, tiles = sum([-(-width // HEADS_COLUMNS) for width in widths]), -(-seq // HEADS_ROWS)
    _launch(
        ((others + 1) * blocks, tiles, batch),
        (first, second, third, slot, out),
        (seq, rank, *first.stride()[:3], *second.stride()[:3], *third.stride()[:3]),
        (),
        (*widths, groups, size, others + 1, to_heads, HEADS_ROWS, HEADS_COLUMNS),
        HEADS_WARPS,
    )


@triton.jit
def _sum_rows(rows, out, count, ROWS: tl.constexpr, ELEMENTS: tl.constexpr):
    places = tl.cast(tl.program_id(0), tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    here = places < count
    total = tl.load(rows + places, mask=here).to(tl.float32)
    for row in tl.static_range(1, ROWS):
        total += tl.load(rows + tl.cast(count, tl.int64) * row + places, mask=here).to(tl.float32)
    tl.store(out + places, total, mask=here)


_launch_sum = Launcher(_sum_rows)


def sum_rows(rows: Tensor, out: Tensor) -> None:
    """out float32 [size] = the sum of the contiguous few rows [number, size], in their order."""
    number, count = rows.shape
    grid = (triton.cdiv(count, SUM_ELEMENTS), 1, 1)
    _launch_sum(grid, (rows, out), (count,), (), (number, SUM_ELEMENTS), SUM_WARPS)
