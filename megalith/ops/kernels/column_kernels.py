"""Column sums in fp32, fused with the computation of the rows: bias gradients, and sums over ranks.

A program computes some columns of some rows and accumulates column sums. The programs' sums are added afterwards in a
fixed order.
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

# Number of programs; ROWS × COLUMNS per tile; STAGES tiles in flight from memory per program.
PROGRAMS, ROWS, COLUMNS, WARPS, STAGES = 1056, 8, 1024, 4, 2
QKV_PROGRAMS, QKV_ROWS, QKV_COLUMNS, QKV_WARPS, QKV_STAGES = 528, 8, 512, 4, 3
SUM_ELEMENTS, SUM_WARPS = 2048, 4
_SLOPE, _CUBIC = tl.constexpr(SLOPE), tl.constexpr(CUBIC)
_POWER = tl.constexpr(-SLOPE * log2(e))  # exponent for exp2, which the device has an instruction for


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
        mask = (rows < tokens) & inside
        offsets = rows.to(tl.int64) * WIDTH + columns
        dy = tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
        square = value * value
        gate = 1 / (1 + tl.exp2(value * (_POWER + _POWER * _CUBIC * square)))  # gelu_tanh's sigmoid
        slope = gate * (1 + value * (1 - gate) * (_SLOPE + 3 * _SLOPE * _CUBIC * square))
        dx = dy * slope
        tl.store(out + offsets, dx.to(out.dtype.element_ty), mask=mask)
        sums += dx
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(parts + tl.program_id(1) * WIDTH + columns, tl.sum(sums, 0), mask=columns < WIDTH)


@triton_op("megalith::gelu_backward", mutates_args={})
def gelu_backward(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of x [tokens, width], given gelu_tanh(x)'s gradient, and its sum over tokens, float32."""
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
    head, dim = columns // SIZE, columns % SIZE
    group, head = head // (QUERIES + 2), head % (QUERIES + 2)
    inside = columns < WIDTH
    is_query = inside & (head < QUERIES)
    is_key = inside & (head == QUERIES)
    is_value = inside & (head == QUERIES + 1)
    query += (group * QUERIES + head) * query_head + dim
    key += group * key_head + dim
    value += group * value_head + dim
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(tokens, ROWS), tl.num_programs(1), num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)[:, None]
        valid = rows < tokens
        batch, token = (rows // seq).to(tl.int64), (rows % seq).to(tl.int64)
        q = tl.load(query + batch * query_batch + token * query_token, mask=valid & is_query, other=0.0)
        k = tl.load(key + batch * key_batch + token * key_token, mask=valid & is_key, other=0.0)
        v = tl.load(value + batch * value_batch + token * value_token, mask=valid & is_value, other=0.0)
        joined = tl.where(is_query, q, tl.where(is_key, k, v))
        tl.store(out + rows.to(tl.int64) * WIDTH + columns, joined, mask=valid & inside)
        sums += joined.to(tl.float32)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(parts + tl.program_id(1) * WIDTH + columns, tl.sum(sums, 0), mask=columns < WIDTH)


@triton_op("megalith::join_qkv", mutates_args={})
def join_qkv(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Interleave query, key and value heads in the row order of linear_qkv.

    query is [batch, seq, heads, size], key and value are [batch, seq, groups, size].

    Returns:
        [batch · seq, groups · (heads / groups + 2) · size], and its sum over tokens, float32.
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


@triton.jit
def _sum_rows(rows, out, count, ROWS: tl.constexpr, ELEMENTS: tl.constexpr):
    offsets = tl.cast(tl.program_id(0), tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = offsets < count
    total = tl.load(rows + offsets, mask=mask).to(tl.float32)
    for row in tl.static_range(1, ROWS):
        total += tl.load(rows + tl.cast(count, tl.int64) * row + offsets, mask=mask).to(tl.float32)
    tl.store(out + offsets, total, mask=mask)


_launch_sum = Launcher(_sum_rows)


def sum_rows(rows: Tensor, out: Tensor) -> None:
    """Write the sum of a few contiguous rows [number, size], in order, to out float32 [size]."""
    number, count = rows.shape
    grid = (triton.cdiv(count, SUM_ELEMENTS), 1, 1)
    _launch_sum(grid, (rows, out), (count,), (), (number, SUM_ELEMENTS), SUM_WARPS)
