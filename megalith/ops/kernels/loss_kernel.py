"""Softmax cross-entropy of a chunk of logits in one kernel: losses, and gradients that overwrite the logits.

Each program handles a row. It accumulates the sum of exponentials relative to the largest entry that each lane has
seen, then computes the gradient from the entries again. A row of 16-bit entries stays in registers in between, two
entries in each, so that memory is read and written once. Rows of other dtypes and longer rows are read twice, the
second time partly from the cache.
"""

from __future__ import annotations

from math import e, log2

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows kept in registers: maximum width; warps; pairs of entries per lane and tile; number of kept entries, all others
# being read again; registers per lane. With 8 warps a row of 50,304 entries needs 100 of 128 registers, and an SM runs
# two programs: one reads while the other computes.
WIDEST, HELD_WARPS, PAIRS, HELD, REGISTERS = 2**16, 8, 4, 51200, 128
# Rows that are read twice: ROWS × LANES entries at a time.
ROWS, LANES, WARPS = 4, 2048, 8
_LOG2_E = tl.constexpr(log2(e))  # for exp2, which the device has an instruction for


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
    label_logit = tl.load(logits + label, mask=here, other=0.0).to(tl.float32)
    lanes = tl.arange(0, LANES)[:, None]
    inside = lanes * PAIRS + tl.arange(0, PAIRS)[None, :]
    largest, total = tl.full([LANES], -1e30, tl.float32), tl.zeros([LANES], tl.float32)
    kept_entries = ()
    for tile in tl.static_range(TILES):
        offsets = tile * TILE + inside
        entries = tl.load(pairs + offsets, mask=offsets < WIDTH // 2, other=0)
        if tile * 2 * TILE < HELD:
            kept_entries += (entries,)
        even, odd = _unpacked(entries, dtype)
        if (tile + 1) * 2 * TILE > REAL:
            even = tl.where(2 * offsets < REAL, even, float("-inf"))
            odd = tl.where(2 * offsets + 1 < REAL, odd, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(tl.maximum(even, odd), 1) * _LOG2_E)
        shift = new_largest[:, None]
        sums = tl.sum(tl.exp2(even * _LOG2_E - shift) + tl.exp2(odd * _LOG2_E - shift), 1)
        total = total * tl.exp2(largest - new_largest) + sums
        largest = new_largest
    peak = tl.max(largest, 0)
    total = tl.sum(total * tl.exp2(largest - peak), 0)
    log_sum = peak + tl.log2(total)
    tl.store(losses + row, (log_sum / _LOG2_E - label_logit) * factor)
    # All bits are set, but the compiler cannot know. Otherwise it would keep the entries in fp32, in twice the
    # registers.
    all_bits = tl.where(total > 0, -1, 0)
    for tile in tl.static_range(TILES - 1, -1, -1):
        offsets = tile * TILE + inside
        if tile * 2 * TILE < HELD:
            entries = kept_entries[tile] & all_bits
        else:
            entries = tl.load(pairs + offsets, mask=offsets < WIDTH // 2, other=0)
        even, odd = _unpacked(entries, dtype)
        grad = tl.exp2(tl.interleave(even, odd) * _LOG2_E - log_sum) * factor
        columns = 2 * (tile * TILE + lanes * PAIRS) + tl.arange(0, 2 * PAIRS)[None, :]
        if (tile + 1) * 2 * TILE > REAL:
            grad = tl.where(columns < REAL, grad, 0.0)
        tl.store(logits + columns, grad.to(dtype), mask=columns < WIDTH)
    tl.debug_barrier()  # the label's entry is written a second time, by any lane
    grad = (tl.exp2(label_logit * _LOG2_E - log_sum) - 1) * factor
    tl.store(logits + label, grad.to(dtype), mask=here)


@triton.jit
def _unpacked(pairs, dtype: tl.constexpr):
    """Return the entries in the lower and upper 16 bits of int32, as fp32."""
    if dtype == tl.bfloat16:
        return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
    else:
        upper = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
        return pairs.to(tl.int16).to(dtype, bitcast=True).to(tl.float32), upper.to(tl.float32)


@triton.jit
def _softmax_loss(
    logits, index, weight, losses, real, WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr
):
    row = tl.program_id(0)
    logits += tl.cast(row, tl.int64) * WIDTH
    label, factor = tl.load(index + row), tl.load(weight + row)
    label_logit = tl.load(logits + label, mask=(label >= 0) & (label < real), other=0.0).to(tl.float32)
    offsets = tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    largest, total = tl.full([LANES], -1e30, tl.float32), tl.zeros([LANES], tl.float32)
    for first in tl.range(0, WIDTH, ROWS * LANES):
        value = _entries(logits, first + offsets, real, WIDTH)
        new_largest = tl.maximum(largest, tl.max(value, 0) * _LOG2_E)
        total = total * tl.exp2(largest - new_largest) + tl.sum(
            tl.exp2(value * _LOG2_E - new_largest[None, :]), 0
        )
        largest = new_largest
    peak = tl.max(largest, 0)
    log_sum = peak + tl.log2(tl.sum(total * tl.exp2(largest - peak), 0))
    tl.store(losses + row, (log_sum / _LOG2_E - label_logit) * factor)
    tiles: tl.constexpr = (WIDTH + ROWS * LANES - 1) // (ROWS * LANES)
    for tile_from_end in tl.range(tiles):  # last tile first: it is most likely still in the cache
        columns = (tiles - 1 - tile_from_end) * (ROWS * LANES) + offsets
        grad = tl.exp2(_entries(logits, columns, real, WIDTH) * _LOG2_E - log_sum)
        grad = (grad - tl.where(columns == label, 1.0, 0.0)) * factor
        tl.store(logits + columns, grad.to(logits.dtype.element_ty), mask=columns < WIDTH)


@triton.jit
def _entries(logits, columns, real, WIDTH: tl.constexpr):
    # The load is bounded only by the width, which the compiler knows is a multiple of 16: it reads 16 bytes at a time.
    value = tl.load(logits + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    return tl.where(columns < real, value, float("-inf"))


def softmax_loss_(logits: Tensor, index: Tensor, weight: Tensor, real: int) -> Tensor:
    """Return weight · −log softmax(logits)[index] per token, float32 [tokens].

    Overwrites `logits` with the gradient of the sum of the results.

    Args:
        logits: [tokens, rows].
        index: int64 [tokens], the target of each token.
        weight: float32 [tokens].
        real: number of rows without vocabulary padding; the rows after them are ignored.
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
