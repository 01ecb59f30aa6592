"""Kernels in which a row's result does not depend on the other rows: matmuls, attention, norms and softmax statistics.

Tiles have one size for every number of rows, nothing is split along a sum, and Triton may not specialize a kernel by a
number that depends on the batch (`do_not_specialize`), so that every call runs the same instructions. A row's position
in a tile does not matter, because tensor cores compute all rows of a tile alike.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, INNER = 128, 128, 64  # tile of a matmul
NARROW = 32  # of the inner dimension in fp32
SQUARE = 64  # rows and columns of a tile in a batch of small matrices
QUERIES, KEYS = 64, 64  # tile of attention; query heads of a group are rows of a tile
ENTRIES = 4096  # vocabulary entries per step of a softmax
NO_WINDOW = 2**30


@triton.jit
def _tile(tile, ends, rows, GROUPS: tl.constexpr, GROUPED: tl.constexpr, ROWS: tl.constexpr):
    # The group of a row tile, its first row, and the end of the group. Programs of a group's tiles come one group after
    # the other; those after the last tile have nothing to do.
    group, begin, end = tile * 0, tile * 0, rows
    if GROUPED:
        end = tl.load(ends)
        for number in range(1, GROUPS):
            later = tile >= tl.cdiv(end - begin, ROWS)
            if later & (group == number - 1):
                tile -= tl.cdiv(end - begin, ROWS)
                begin = end
                end = tl.load(ends + number)
                group = number
    return group, begin + tile * ROWS, end


@triton.jit(do_not_specialize=["rows"])
def _matmul(
    x, weight, out, ends, rows,
    N: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, GROUPED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    group, first, end = _tile(tl.program_id(0), ends, rows, GROUPS, GROUPED, ROWS)
    if first < end:
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inner = tl.arange(0, INNER)
        left = x + row[:, None] * K + inner[None, :]
        right = weight + group.to(tl.int64) * (N * K) if GROUPED else weight
        right = right + column[None, :] * K + inner[:, None]
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, K, INNER):
            near = inner < K - start
            a = tl.load(left + start, mask=(row < end)[:, None] & near[None, :], other=0.0)
            b = tl.load(right + start, mask=near[:, None] & (column < N)[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
        target = out + row[:, None] * N + column[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=(row < end)[:, None] & (column < N)[None, :])


def tiled_matmul(x: Tensor, weight: Tensor, dtype: torch.dtype, ends: Tensor | None = None) -> Tensor:
    """Return x · weightᵀ, [rows, out].

    Args:
        x: [rows, in].
        weight: [out, in], or with `ends` one matrix per group, [groups, out, in].
        dtype: dtype of the result.
        ends: int32 [groups], end of each group's rows. Rows after the last group are undefined.
    """
    x, weight = x.contiguous(), weight.contiguous()
    rows, inner = x.shape
    columns, groups = weight.shape[-2], 1 if ends is None else len(ends)
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    if not out.numel():
        return out
    tiles = triton.cdiv(rows, ROWS) + groups - 1
    wide = x.dtype == torch.float32
    _matmul[(tiles, triton.cdiv(columns, COLUMNS))](
        x, weight, out, x if ends is None else ends, rows,
        columns, inner, groups, ends is not None, "ieee" if wide else "tf32",
        ROWS, COLUMNS, NARROW if wide else INNER, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _matmul_in_parts(
    x, weight, out, ends, rows, zero,
    N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, GROUPED: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    group, first, end = _tile(tl.program_id(0), ends, rows, GROUPS, GROUPED, ROWS)
    row = (first + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    size: tl.constexpr = K // PARTS
    left = x + row[:, None] * K + inner[None, :]
    right = weight + group.to(tl.int64) * (N * K) if GROUPED else weight
    right = right + column[None, :] * K + inner[:, None]
    for part in tl.static_range(PARTS):
        # With a constant zero, Triton turns `one + dot(a, b, 0)` into `dot(a, b, one)`, another order of additions.
        total = tl.full([ROWS, COLUMNS], zero, tl.float32)
        for start in range(0, size, INNER):
            near = inner < size - start
            a = tl.load(left + part * size + start, mask=(row < end)[:, None] & near[None, :], other=0.0)
            b = tl.load(right + part * size + start, mask=near[:, None] & (column < N)[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
        # The binary tree of the parts: sums of one, two and four wait for their neighbours.
        if part % 2 == 0:
            one = total
        else:
            total = one + total
            if part % 4 == 1:
                two = total
            else:
                total = two + total
                if part % 8 == 3:
                    four = total
                else:
                    total = four + total
    target = out + row[:, None] * N + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(row < end)[:, None] & (column < N)[None, :])


def matmul_in_parts(
    x: Tensor, weight: Tensor, dtype: torch.dtype, parts: int, ends: Tensor | None = None
) -> Tensor:
    """Return x · weightᵀ, [rows, out], with the products of equal parts of the inner dimension added by a binary tree.

    Args:
        x: [rows, in].
        weight: [out, in], or with `ends` one matrix per group, [groups, out, in].
        dtype: dtype of the result.
        parts: 1, 2, 4 or 8, a divisor of `in`.
        ends: int32 [groups], end of each group's rows. Rows after the last group are undefined.
    """
    x, weight = x.contiguous(), weight.contiguous()
    rows, inner = x.shape
    columns, groups = weight.shape[-2], 1 if ends is None else len(ends)
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    wide = x.dtype == torch.float32
    if out.numel():
        # Four sums of a tile are alive at once, so it has half of the columns.
        tiles = triton.cdiv(rows, ROWS) + groups - 1
        _matmul_in_parts[(tiles, triton.cdiv(columns, COLUMNS // 2))](
            x, weight, out, x if ends is None else ends, rows, 0.0,
            columns, inner, parts, groups, ends is not None, "ieee" if wide else "tf32",
            ROWS, COLUMNS // 2, NARROW if wide else INNER, num_warps=8, num_stages=3,
        )  # fmt: skip
    return out


@triton.jit
def _batched_matmul(
    x, y, out,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    left = x + number * (M * K) + row[:, None] * K + inner[None, :]
    right = y + number * (K * N) + inner[:, None] * N + column[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, K, INNER):
        near = inner < K - start
        a = tl.load(left + start, mask=(row < M)[:, None] & near[None, :], other=0.0)
        b = tl.load(right + start * N, mask=near[:, None] & (column < N)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    target = out + number * (M * N) + row[:, None] * N + column[None, :]
    tl.store(target, total, mask=(row < M)[:, None] & (column < N)[None, :])


def tiled_batched_matmul(x: Tensor, y: Tensor) -> Tensor:
    """Return x @ y, float32 [matrices, rows, columns], for float32 x [matrices, rows, inner] and y [matrices, inner,
    columns].
    """
    x, y = x.contiguous(), y.contiguous()
    (matrices, rows, inner), columns = x.shape, y.shape[2]
    out = torch.empty(matrices, rows, columns, dtype=torch.float32, device=x.device)
    if out.numel():
        _batched_matmul[(matrices, triton.cdiv(rows, SQUARE), triton.cdiv(columns, SQUARE))](
            x, y, out, rows, columns, inner, SQUARE, SQUARE, NARROW, num_warps=4, num_stages=3
        )
    return out


@triton.jit(
    do_not_specialize=[
        "queries", "window", "scale", "query_row", "query_token", "key_row", "key_token", "key_head", "value_row",
        "value_token", "value_head",
    ]
)  # fmt: skip
def _attend(
    query, key, value, positions, starts, out, lse, queries, window, scale,
    query_row, query_token, key_row, key_token, key_head, value_row, value_token, value_head,
    GROUPS: tl.constexpr, IN_GROUP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    group, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    token, head = row // IN_GROUP, group * IN_GROUP + row % IN_GROUP
    inside = token < queries
    dims, keys = tl.arange(0, WIDTH), tl.arange(0, KEYS)
    position = tl.load(positions + batch * queries + token, mask=inside, other=-1).to(tl.int32)
    begin_of = tl.load(starts + batch * queries + token, mask=inside, other=0).to(tl.int32)
    begin_of = tl.where(inside, begin_of, 2147483647)
    address = batch * query_row + token[:, None] * query_token + head[:, None] * SIZE + dims[None, :]
    shape = inside[:, None] & (dims < SIZE)[None, :]
    q = tl.load(query + address, mask=shape, other=0.0)
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    result = tl.zeros([QUERIES, WIDTH], tl.float32)
    key += batch * key_row + group * key_head
    value += batch * value_row + group * value_head
    begin = tl.min(begin_of)
    while begin < 2147483647:  # the documents of this tile
        chosen = begin_of == begin
        end = tl.max(tl.where(chosen, position, -1)) + 1
        lowest = tl.min(tl.where(chosen, position, 2147483647)) - window + 1
        first = begin + tl.maximum(lowest - begin, 0) // KEYS * KEYS
        for start in range(first, end, KEYS):
            number = start + keys
            columns = (number < end)[:, None] & (dims < SIZE)[None, :]
            k = tl.load(key + number[:, None] * key_token + dims[None, :], mask=columns, other=0.0)
            v = tl.load(value + number[:, None] * value_token + dims[None, :], mask=columns, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            seen = chosen[:, None] & (number[None, :] <= position[:, None])
            seen = seen & (number[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            highest = tl.maximum(largest, tl.max(scores, 1))
            base = tl.where(highest == float("-inf"), 0.0, highest)
            weights = tl.exp(scores - base[:, None])
            decay = tl.exp(largest - base)
            total = total * decay + tl.sum(weights, 1)
            result = tl.dot(weights.to(v.dtype), v, result * decay[:, None], input_precision=PRECISION)
            largest = highest
        begin = tl.min(tl.where(begin_of > begin, begin_of, 2147483647))
    total = tl.where(inside, total, 1.0)
    target = (
        out + ((batch * queries + token[:, None]) * GROUPS * IN_GROUP + head[:, None]) * SIZE + dims[None, :]
    )
    tl.store(target, (result / total[:, None]).to(out.dtype.element_ty), mask=shape)
    tl.store(lse + (batch * GROUPS * IN_GROUP + head) * queries + token, largest + tl.log(total), mask=inside)


def tiled_attention(
    query: Tensor,  # [batch, queries, heads, head_dim]
    key: Tensor,  # [batch, keys, groups, head_dim]
    value: Tensor,  # [batch, keys, groups, head_dim]
    positions: Tensor,  # int64 [batch, queries]
    starts: Tensor | None,  # int64 [batch, queries]
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return attention as ops.batch_invariant.invariant_attention.attend does."""
    batch, queries, heads, size = query.shape
    groups = key.shape[2]
    query, positions = query.contiguous(), positions.contiguous()
    starts = torch.zeros_like(positions) if starts is None else starts.contiguous()
    key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (key, value))
    out = torch.empty_like(query)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=query.device)
    _attend[(triton.cdiv(queries * heads // groups, QUERIES), groups, batch)](
        query, key, value, positions, starts, out, lse, queries, window or NO_WINDOW, scale,
        *query.stride()[:2], *key.stride()[:3], *value.stride()[:3],
        groups, heads // groups, size, triton.next_power_of_2(max(size, 16)),
        "ieee" if query.dtype == torch.float32 else "tf32", QUERIES, KEYS, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out, lse


@triton.jit
def _row_norm(
    x, factor, shift, out, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr
):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < WIDTH
    values = tl.load(x + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        values = tl.where(inside, values - tl.sum(values, 0) / WIDTH, 0.0)
    values *= tl.rsqrt(tl.sum(values * values, 0) / WIDTH + epsilon)
    values *= tl.load(factor + columns, mask=inside, other=0.0)
    if CENTRED:
        values += tl.load(shift + columns, mask=inside, other=0.0)
    tl.store(out + row * WIDTH + columns, values.to(out.dtype.element_ty), mask=inside)


def row_norm(x: Tensor, factor: Tensor, shift: Tensor | None, epsilon: float) -> Tensor:
    """Return the norm of x [..., width] times `factor`, plus `shift`, both float32 [width]: RMSNorm without a shift."""
    width = x.shape[-1]
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    shift_or_any = factor if shift is None else shift
    if x.numel():
        _row_norm[(x.numel() // width,)](
            x, factor.contiguous(), shift_or_any.contiguous(), out, epsilon, width, block, shift is not None,
            num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip
    return out


@triton.jit
def _softmax_sums(z, highest_of, total_of, product_of, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        inside = columns < WIDTH - start
        values = tl.load(z + row * WIDTH + start + columns, mask=inside, other=float("-inf"))
        largest = tl.maximum(largest, values)
    highest = tl.max(largest, 0)
    total, product = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        inside = columns < WIDTH - start
        shifted = tl.load(z + row * WIDTH + start + columns, mask=inside, other=0.0) - highest
        weights = tl.where(inside, tl.exp(shifted), 0.0)
        total += weights
        product += weights * shifted
    tl.store(highest_of + row, highest)
    tl.store(total_of + row, tl.sum(total, 0))
    tl.store(product_of + row, tl.sum(product, 0))


def softmax_sums(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return max z, Σ exp(z - max z) and Σ exp(z - max z) · (z - max z), three tensors [...], for float32 z [...,
    entries]."""
    z = z.contiguous()
    sums = [torch.empty(z.shape[:-1], dtype=torch.float32, device=z.device) for _ in range(3)]
    if sums[0].numel():
        _softmax_sums[(sums[0].numel(),)](z, *sums, z.shape[-1], ENTRIES, num_warps=8)
    return sums[0], sums[1], sums[2]
