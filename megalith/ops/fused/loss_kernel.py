"""Softmax cross-entropy of a chunk of logits: losses, and gradients in the place of the logits, by one kernel.

A program has a row. It takes the sum of exponentials as the entries come, relative to the largest that each lane has
seen, and then makes the gradient from the entries again. A row of 16-bit entries up to WIDEST stays in registers in
between, two entries in each, so that memory is read once and written once. Others are read twice, the second time
in part from the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Of rows that are held: the widest; warps; pairs of entries that a lane has in a tile; entries that are held, all
# others being read again; registers that a lane may have (None: what the warps leave, 64 with 32 of them, of which a
# row of 50,304 entries takes 28).
WIDEST, HELD_WARPS, PAIRS, HELD, REGISTERS = 2**16, 32, 4, 2**16, None
# A row that is read twice: entries at a time, ROWS for each of the LANES.
ROWS, LANES, WARPS = 4, 2048, 8


@triton.jit
def _held_softmax_loss(
    logits, index, weight, losses, REAL: tl.constexpr, WIDTH: tl.constexpr,
    LANES: tl.constexpr, PAIRS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = logits.dtype.element_ty
    TILE: tl.constexpr = LANES * PAIRS
    TILES: tl.constexpr = (WIDTH // 2 + TILE - 1) // TILE
    row = tl.program_id(0)
    logits += tl.cast(row, tl.int64) * WIDTH
    pairs = logits.to(tl.pointer_type(tl.int32))
    label, factor = tl.load(index + row), tl.load(weight + row)
    here = (label >= 0) & (label < REAL)
    of_label = tl.load(logits + label, mask=here, other=0.0).to(tl.float32)
    lanes = tl.arange(0, LANES)[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    largest, total = tl.full([LANES], -1e30, tl.float32), tl.zeros([LANES], tl.float32)
    held = ()
    for tile in tl.static_range(TILES):
        places = tile * TILE + lanes
        entries = tl.load(pairs + places, mask=places < WIDTH // 2, other=0)
        if tile * 2 * TILE < HELD:
            held += (entries,)
        even, odd = _unpacked(entries, dtype)
        if (tile + 1) * 2 * TILE > REAL:
            even = tl.where(2 * places < REAL, even, float("-inf"))
            odd = tl.where(2 * places + 1 < REAL, odd, float("-inf"))
        above = tl.maximum(largest, tl.max(tl.maximum(even, odd), 1))
        sums = tl.sum(tl.exp(even - above[:, None]) + tl.exp(odd - above[:, None]), 1)
        total = total * tl.exp(largest - above) + sums
        largest = above
    peak = tl.max(largest, 0)
    total = tl.sum(total * tl.exp(largest - peak), 0)
    log_sum = peak + tl.log(total)
    tl.store(losses + row, (log_sum - of_label) * factor)
    # Every bit, but the compiler cannot know: otherwise it would keep the entries as the fp32 numbers that they were
    # above, in twice the registers.
    every = tl.where(total > 0, -1, 0)
    for tile in tl.static_range(TILES - 1, -1, -1):
        places = tile * TILE + lanes
        if tile * 2 * TILE < HELD:
            entries = held[tile] & every
        else:
            entries = tl.load(pairs + places, mask=places < WIDTH // 2, other=0)
        even, odd = _unpacked(entries, dtype)
        even, odd = tl.exp(even - log_sum) * factor, tl.exp(odd - log_sum) * factor
        if (tile + 1) * 2 * TILE > REAL:
            even, odd = tl.where(2 * places < REAL, even, 0.0), tl.where(2 * places + 1 < REAL, odd, 0.0)
        tl.store(pairs + places, _packed(even, dtype) | (_packed(odd, dtype) << 16), mask=places < WIDTH // 2)
    tl.debug_barrier()  # the label's entry is written a second time, by whichever lane
    tl.store(logits + label, ((tl.exp(of_label - log_sum) - 1) * factor).to(dtype), mask=here)


@triton.jit
def _unpacked(pairs, dtype: tl.constexpr):
    """The entries in the lower and the upper 16 bits of int32, as fp32."""
    if dtype == tl.bfloat16:
        return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
    else:
        upper = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
        return pairs.to(tl.int16).to(dtype, bitcast=True).to(tl.float32), upper.to(tl.float32)


@triton.jit
def _packed(entries, dtype: tl.constexpr):
    return entries.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _softmax_loss(
    logits, index, weight, losses, real, WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr
):
    row = tl.program_id(0)
    logits += tl.cast(row, tl.int64) * WIDTH
    label, factor = tl.load(index + row), tl.load(weight + row)
    of_label = tl.load(logits + label, mask=(label >= 0) & (label < real), other=0.0).to(tl.float32)
    places = tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    largest, total = tl.full([LANES], -1e30, tl.float32), tl.zeros([LANES], tl.float32)
    for first in tl.range(0, WIDTH, ROWS * LANES):
        value = _entries(logits, first + places, real, WIDTH)
        above = tl.maximum(largest, tl.max(value, 0))
        total = total * tl.exp(largest - above) + tl.sum(tl.exp(value - above[None, :]), 0)
        largest = above
    peak = tl.max(largest, 0)
    log_sum = peak + tl.log(tl.sum(total * tl.exp(largest - peak), 0))
    tl.store(losses + row, (log_sum - of_label) * factor)
    tiles: tl.constexpr = (WIDTH + ROWS * LANES - 1) // (ROWS * LANES)
    for back in tl.range(tiles):  # the last first: it is the likeliest to be in the cache still
        columns = (tiles - 1 - back) * (ROWS * LANES) + places
        grad = tl.exp(_entries(logits, columns, real, WIDTH) - log_sum)
        grad = (grad - tl.where(columns == label, 1.0, 0.0)) * factor
        tl.store(logits + columns, grad.to(logits.dtype.element_ty), mask=columns < WIDTH)


@triton.jit
def _entries(logits, columns, real, WIDTH: tl.constexpr):
    # The load is bounded by the width alone, of which the compiler knows that 16 divides it: so it reads 16 bytes at a
    # time.
    value = tl.load(logits + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    return tl.where(columns < real, value, float("-inf"))


def softmax_loss_(logits: Tensor, index: Tensor, weight: Tensor, real: int) -> Tensor:
    """weight · −log softmax(logits)[index] of each token, float32 [tokens]; the gradient of their sum replaces logits.

    `logits` [tokens, rows], `index` int64 [tokens], `weight` float32 [tokens]; rows from `real` on are padding and take
    no part.
    """
    tokens, rows = logits.shape
    losses, real = torch.empty_like(weight), min(real, rows)
    if logits.element_size() == 2 and rows % 2 == 0 and rows <= WIDEST:
        _held_softmax_loss[(tokens,)](
            logits, index, weight, losses, REAL=real, WIDTH=rows,
            LANES=32 * HELD_WARPS, PAIRS=PAIRS, HELD=HELD, num_warps=HELD_WARPS, maxnreg=REGISTERS,
        )  # fmt: skip
    else:
        _softmax_loss[(tokens,)](
            logits, index, weight, losses, real, WIDTH=rows, ROWS=ROWS, LANES=LANES, num_warps=WARPS
        )
    return losses
