"""Kernels in which a row's result does not depend on the other rows: attention, norms, softmax statistics and matmuls
of small matrices. invariant_matmul.py has the matmuls of linears.

Tiles have one size for every number of rows, nothing is split along a sum, and Triton may not specialize a kernel by a
number that depends on the batch (`do_not_specialize`), so that every call runs the same instructions. A row's position
in a tile does not matter, because tensor cores compute all rows of a tile alike.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SQUARE, INNER = 64, 32  # tile of a matmul of small matrices
KEYS = 64  # of a tile of attention
# Rows of a tile, which are the tokens and query heads of a group. A decode step has few.
QUERIES, FEW_QUERIES = 64, 16
STAGES = {256: 3, 512: 2}  # loads in flight, by the largest size in bytes of a padded key
# If this number of elements divides every stride, the kernel gets strides in this unit. The compiler then knows that
# rows are aligned, and loads 16 bytes at a time.
UNIT = 16
ENTRIES = 4096  # vocabulary entries per step of a softmax
NO_WINDOW = 2**30


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
            x, y, out, rows, columns, inner, SQUARE, SQUARE, INNER, num_warps=4, num_stages=3
        )
    return out


@triton.jit
def _attend_block(q, k, v, seen, scale, largest, total, result, PRECISION: tl.constexpr):
    # The running maxima, sums of weights and weighted sums of values, with the keys of one more block.
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp(scores - base[:, None])
    decay = tl.exp(largest - base)
    total = total * decay + tl.sum(weights, 1)
    result = tl.dot(weights.to(v.dtype), v, result * decay[:, None], input_precision=PRECISION)
    return highest, total, result


@triton.jit
def _load_block(key, value, number, end, key_token, value_token, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    dims = tl.arange(0, WIDTH)[None, :]
    inside = (number < end)[:, None] & (dims < SIZE)
    k = tl.load(key + number[:, None] * key_token + dims, mask=inside, other=0.0)
    v = tl.load(value + number[:, None] * value_token + dims, mask=inside, other=0.0)
    return k, v


@triton.jit(
    do_not_specialize=[
        "queries", "window", "scale", "query_row", "query_token", "key_row", "key_token", "key_head", "value_row",
        "value_token", "value_head",
    ]
)  # fmt: skip
def _attend(
    query, key, value, positions, starts, out, lse, queries, window, scale,
    query_row, query_token, key_row, key_token, key_head, value_row, value_token, value_head,  # in units of UNIT
    GROUPS: tl.constexpr, IN_GROUP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, UNIT: tl.constexpr, ONE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    group, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    token, head = row // IN_GROUP, group * IN_GROUP + row % IN_GROUP
    inside = token < queries
    dims, keys = tl.arange(0, WIDTH), tl.arange(0, KEYS)
    address = batch * query_row * UNIT + token[:, None] * (query_token * UNIT) + head[:, None] * SIZE
    shape = inside[:, None] & (dims < SIZE)[None, :]
    q = tl.load(query + address + dims[None, :], mask=shape, other=0.0)
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    result = tl.zeros([QUERIES, WIDTH], tl.float32)
    key_token, value_token = key_token * UNIT, value_token * UNIT
    key += batch * key_row * UNIT + group * (key_head * UNIT)
    value += batch * value_row * UNIT + group * (value_head * UNIT)
    if ONE:  # one query per row of the batch, as in a decode step
        end = tl.load(positions + batch).to(tl.int32) + 1
        begin = tl.load(starts + batch).to(tl.int32)
        first = begin + tl.maximum(end - window - begin, 0) // KEYS * KEYS
        for start in tl.range(first, end, KEYS, num_stages=STAGES):
            number = start + keys
            k, v = _load_block(key, value, number, end, key_token, value_token, SIZE, WIDTH)
            seen = (number < end) & (number >= end - window)
            largest, total, result = _attend_block(
                q, k, v, seen[None, :], scale, largest, total, result, PRECISION
            )
    else:
        position = tl.load(positions + batch * queries + token, mask=inside, other=-1).to(tl.int32)
        begin_of = tl.load(starts + batch * queries + token, mask=inside, other=0).to(tl.int32)
        begin_of = tl.where(inside, begin_of, 2147483647)
        begin = tl.min(begin_of)
        while begin < 2147483647:  # the documents of this tile
            chosen = begin_of == begin
            end = tl.max(tl.where(chosen, position, -1)) + 1
            lowest = tl.min(tl.where(chosen, position, 2147483647)) - window + 1
            first = begin + tl.maximum(lowest - begin, 0) // KEYS * KEYS
            for start in tl.range(first, end, KEYS, num_stages=STAGES):
                number = start + keys
                k, v = _load_block(key, value, number, end, key_token, value_token, SIZE, WIDTH)
                seen = chosen[:, None] & (number[None, :] <= position[:, None])
                seen = seen & (number[None, :] > position[:, None] - window)
                largest, total, result = _attend_block(
                    q, k, v, seen, scale, largest, total, result, PRECISION
                )
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
    rows = queries * heads // groups
    # With a warp for 16 rows, both tiles add the weights of a row in the same order.
    tile = FEW_QUERIES if rows <= FEW_QUERIES and query.dtype != torch.float32 else QUERIES
    strides = *query.stride()[:2], *key.stride()[:3], *value.stride()[:3]
    unit = 1 if any(stride % UNIT for stride in strides) else UNIT
    width = triton.next_power_of_2(max(size, 16))
    one = queries == 1
    stages = next((count - one for limit, count in STAGES.items() if width * query.itemsize <= limit), 1)
    _attend[(triton.cdiv(rows, tile), groups, batch)](
        query, key, value, positions, starts, out, lse, queries, window or NO_WINDOW, scale,
        *(stride // unit for stride in strides), groups, heads // groups, size, width,
        "ieee" if query.dtype == torch.float32 else "tf32", tile, KEYS, unit, one, stages,
        num_warps=tile // 16,
    )  # fmt: skip
    return out, lse


@triton.jit(do_not_specialize=["rows"])
def _row_norm(
    x,
    factor,
    shift,
    out,
    stats,
    rows,
    epsilon,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTRED: tl.constexpr,
):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < WIDTH
    values = tl.load(x + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        mean = tl.sum(values, 0) / WIDTH
        tl.store(stats + rows + row, mean)
        values = tl.where(inside, values - mean, 0.0)
    scale = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + epsilon)
    tl.store(stats + row, scale)
    values *= scale
    values *= tl.load(factor + columns, mask=inside, other=0.0)
    if CENTRED:
        values += tl.load(shift + columns, mask=inside, other=0.0)
    tl.store(out + row * WIDTH + columns, values.to(out.dtype.element_ty), mask=inside)


def row_norm(x: Tensor, factor: Tensor, shift: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the norm of x [..., width] times `factor`, plus `shift`, both float32 [width], and its statistics.

    Without a shift it is RMSNorm. The statistics are those of ops.kernels.norm_kernel.norm_forward.
    """
    width = x.shape[-1]
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, block = x.numel() // width, triton.next_power_of_2(width)
    stats = torch.empty(1 if shift is None else 2, rows, dtype=torch.float32, device=x.device)
    shift_or_any = factor if shift is None else shift
    if rows:
        _row_norm[(rows,)](
            x, factor.contiguous(), shift_or_any.contiguous(), out, stats, rows, epsilon, width, block,
            shift is not None, num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip
    return out, stats


@triton.jit(do_not_specialize=["tokens", "temperature_step"])
def _softmax_sums(
    logits, temperature, sums, tokens, temperature_step, PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token, part, columns = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    divisor = tl.load(temperature + token * temperature_step)
    logits += (token * PARTS + part) * WIDTH + columns
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        values = tl.load(logits + start, mask=columns < WIDTH - start, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, tl.div_rn(values, divisor))
    highest = tl.max(largest, 0)
    total, product = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        inside = columns < WIDTH - start
        values = tl.load(logits + start, mask=inside, other=0.0).to(tl.float32)
        shifted = tl.div_rn(values, divisor) - highest
        weights = tl.where(inside, tl.exp(shifted), 0.0)
        total += weights
        product += weights * shifted
    sums += part * tokens + token
    tl.store(sums, highest)
    tl.store(sums + PARTS * tokens, tl.sum(total, 0))
    tl.store(sums + 2 * PARTS * tokens, tl.sum(product, 0))


def softmax_sums(logits: Tensor, temperature: Tensor, parts: int) -> Tensor:
    """Return max z, Σ exp(z - max z) and Σ exp(z - max z) · (z - max z) of each chunk of the vocabulary.

    They are float32 [3, parts, tokens], of z = logits / temperature.

    Args:
        logits: [tokens, entries].
        temperature: float32 [] or [tokens, 1].
        parts: divisor of the number of entries.
    """
    logits, tokens = logits.contiguous(), len(logits)
    sums = torch.empty(3, parts, tokens, dtype=torch.float32, device=logits.device)
    if tokens:
        step = temperature.stride(0) if temperature.ndim else 0
        _softmax_sums[(tokens, parts)](
            logits, temperature, sums, tokens, step, parts, logits.shape[1] // parts, ENTRIES, num_warps=8
        )
    return sums


@triton.jit(do_not_specialize=["count", "tokens", "pairs"])
def _add_pairs_of_sums(sums, added, count, tokens, pairs, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    left = sums + index // tokens * 2 * tokens + index % tokens
    size = 2 * pairs * tokens.to(tl.int64)  # of each of the three sums
    a, b = tl.load(left, mask=inside, other=0.0), tl.load(left + tokens, mask=inside, other=0.0)
    highest = tl.maximum(a, b)
    a, b = a - highest, b - highest
    total_a = tl.load(left + size, mask=inside, other=0.0) * tl.exp(a)
    total_b = tl.load(left + size + tokens, mask=inside, other=0.0) * tl.exp(b)
    product_a = tl.load(left + 2 * size, mask=inside, other=0.0) * tl.exp(a) + total_a * a
    product_b = tl.load(left + 2 * size + tokens, mask=inside, other=0.0) * tl.exp(b) + total_b * b
    tl.store(added + index, highest, mask=inside)
    tl.store(added + count + index, total_a + total_b, mask=inside)
    tl.store(added + 2 * count.to(tl.int64) + index, product_a + product_b, mask=inside)


def add_pairs_of_sums(sums: Tensor) -> Tensor:
    """Add pairs of neighbouring chunk sums. Returns float32 [3, chunks / 2, tokens].

    `sums` are those of `softmax_sums`, [3, parts, tokens], with an even number of parts.
    """
    sums, (_, parts, tokens) = sums.contiguous(), sums.shape
    added = torch.empty(3, parts // 2, tokens, dtype=torch.float32, device=sums.device)
    if count := parts // 2 * tokens:
        _add_pairs_of_sums[(triton.cdiv(count, 256),)](sums, added, count, tokens, parts // 2, 256)
    return added
