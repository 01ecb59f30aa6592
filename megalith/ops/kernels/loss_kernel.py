"""Softmax cross-entropy of a chunk of logits: losses, and gradients in the place of the logits, by one kernel.

A program has a row. It takes the sum of exponentials as the entries come, relative to the largest that each lane has
seen, and then makes the gradient from the entries again. In between a row of 16-bit entries stays in registers, two
entries in each, so that memory is read once and written once. Rows of other types, and longer ones, are read twice, the
second time in part from the cache.

Sampling is one pass over the logits: the largest of logit + temperature · noise, and the softmax's sum. A program
has a block of a row. What it finds are five numbers (ops/gumbel.py), which are then put together over the blocks of a
row and, under tensor parallelism, over the ranks.
"""

from __future__ import annotations

from math import e, log2

import torch
import triton
import triton.language as tl
from torch import Tensor

# Of rows that are held: the widest; warps; pairs of entries that a lane has in a tile; entries that are held, all
# others being read again; registers of a lane. With 8 warps a row of 50,304 entries takes 100 of 128, and a
# SM has two programs: one reads while the other computes.
WIDEST, HELD_WARPS, PAIRS, HELD, REGISTERS = 2**16, 8, 4, 51200, 128
# A row that is read twice: entries at a time, ROWS for each of the LANES.
ROWS, LANES, WARPS = 4, 2048, 8
_LOG2_E = tl.constexpr(log2(e))  # exponentials are powers of two, for which the device has an instruction


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
    lanes = tl.arange(0, LANES)[:, None]
    inside = lanes * PAIRS + tl.arange(0, PAIRS)[None, :]
    largest, total = tl.full([LANES], -1e30, tl.float32), tl.zeros([LANES], tl.float32)
    held = ()
    for tile in tl.static_range(TILES):
        places = tile * TILE + inside
        entries = tl.load(pairs + places, mask=places < WIDTH // 2, other=0)
        if tile * 2 * TILE < HELD:
            held += (entries,)
        even, odd = _unpacked(entries, dtype)
        if (tile + 1) * 2 * TILE > REAL:
            even = tl.where(2 * places < REAL, even, float("-inf"))
            odd = tl.where(2 * places + 1 < REAL, odd, float("-inf"))
        above = tl.maximum(largest, tl.max(tl.maximum(even, odd), 1) * _LOG2_E)
        shift = above[:, None]
        sums = tl.sum(tl.exp2(even * _LOG2_E - shift) + tl.exp2(odd * _LOG2_E - shift), 1)
        total = total * tl.exp2(largest - above) + sums
        largest = above
    peak = tl.max(largest, 0)
    total = tl.sum(total * tl.exp2(largest - peak), 0)
    log_sum = peak + tl.log2(total)
    tl.store(losses + row, (log_sum / _LOG2_E - of_label) * factor)
    # Every bit, but the compiler cannot know: otherwise it would keep the entries as the fp32 numbers that they were
    # above, in twice the registers.
    every = tl.where(total > 0, -1, 0)
    for tile in tl.static_range(TILES - 1, -1, -1):
        places = tile * TILE + inside
        if tile * 2 * TILE < HELD:
            entries = held[tile] & every
        else:
            entries = tl.load(pairs + places, mask=places < WIDTH // 2, other=0)
        even, odd = _unpacked(entries, dtype)
        grad = tl.exp2(tl.interleave(even, odd) * _LOG2_E - log_sum) * factor
        columns = 2 * (tile * TILE + lanes * PAIRS) + tl.arange(0, 2 * PAIRS)[None, :]
        if (tile + 1) * 2 * TILE > REAL:
            grad = tl.where(columns < REAL, grad, 0.0)
        tl.store(logits + columns, grad.to(dtype), mask=columns < WIDTH)
    tl.debug_barrier()  # the label's entry is written a second time, by whichever lane
    grad = (tl.exp2(of_label * _LOG2_E - log_sum) - 1) * factor
    tl.store(logits + label, grad.to(dtype), mask=here)


@triton.jit
def _unpacked(pairs, dtype: tl.constexpr):
    """The entries in the lower and the upper 16 bits of int32, as fp32."""
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
    of_label = tl.load(logits + label, mask=(label >= 0) & (label < real), other=0.0).to(tl.float32)
    places = tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    largest, total = tl.full([LANES], -1e30, tl.float32), tl.zeros([LANES], tl.float32)
    for first in tl.range(0, WIDTH, ROWS * LANES):
        value = _entries(logits, first + places, real, WIDTH)
        above = tl.maximum(largest, tl.max(value, 0) * _LOG2_E)
        total = total * tl.exp2(largest - above) + tl.sum(tl.exp2(value * _LOG2_E - above[None, :]), 0)
        largest = above
    peak = tl.max(largest, 0)
    log_sum = peak + tl.log2(tl.sum(total * tl.exp2(largest - peak), 0))
    tl.store(losses + row, (log_sum / _LOG2_E - of_label) * factor)
    tiles: tl.constexpr = (WIDTH + ROWS * LANES - 1) // (ROWS * LANES)
    for back in tl.range(tiles):  # the last first: it is the likeliest to be in the cache still
        columns = (tiles - 1 - back) * (ROWS * LANES) + places
        grad = tl.exp2(_entries(logits, columns, real, WIDTH) * _LOG2_E - log_sum)
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


SAMPLED, SAMPLED_LANES, SAMPLED_WARPS = 4096, 1024, 4  # entries of a block, at a time, and warps


@triton.jit
def mix(h):
    """ops.dropout.mix, of uint32."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _noise(keys):
    """−log of ops.gumbel.exponential of the keys, uint32."""
    bits = (mix(keys) & 0x7FFFFFFF).to(tl.int32)
    v = (bits.to(tl.float32) + 0.5) * 4.656612873077393e-10
    near = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5)))))
    return -tl.log(tl.where(v < 0.0625, near, -tl.log(1 - v)))


@triton.jit
def _sample(
    logits, keys, least, found, row_stride, first, real, temperature, inverse,
    BLOCK: tl.constexpr, LANES: tl.constexpr, FILTERED: tl.constexpr, NOISY: tl.constexpr,
):  # fmt: skip
    row, block, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    logits += row.to(tl.int64) * row_stride
    key = tl.load(keys + row).to(tl.uint32, bitcast=True)
    lanes = tl.arange(0, LANES)
    best = tl.full([LANES], float("-inf"), tl.float32)
    at, of_best = best, best
    largest, total = tl.full([LANES], -1e30, tl.float32), tl.zeros([LANES], tl.float32)
    for begin in tl.static_range(0, BLOCK, LANES):
        columns = block * BLOCK + begin + lanes
        z = tl.load(logits + columns, mask=columns < real, other=float("-inf")).to(tl.float32)
        if FILTERED:
            z = tl.where(z >= tl.load(least + row), z, float("-inf"))
        noisy = z
        if NOISY:
            noisy = z + temperature * _noise(key ^ mix((first + columns).to(tl.uint32)))
        better = noisy > best
        at, of_best = tl.where(better, columns.to(tl.float32), at), tl.where(better, z, of_best)
        best = tl.maximum(best, noisy)
        above = tl.maximum(largest, z)
        total = total * tl.exp((largest - above) * inverse) + tl.exp((z - above) * inverse)
        largest = above
    peak, top = tl.max(best, 0), tl.max(largest, 0)
    index = tl.min(tl.where(best == peak, at, float("inf")), 0)
    chosen = tl.max(tl.where(at == index, of_best, float("-inf")), 0)
    sums = tl.sum(total * tl.exp((largest - top) * inverse), 0)
    found += (row * blocks + block) * 5
    tl.store(found, peak)
    tl.store(found + 1, index + first)
    tl.store(found + 2, chosen)
    tl.store(found + 3, top)
    tl.store(found + 4, sums)


def sampled_blocks(
    logits: Tensor,
    keys: Tensor,
    least: Tensor | None,
    first: int,
    real: int,
    temperature: float,
    inverse: float,
) -> Tensor:
    """As ops.gumbel.sampled_blocks, on a GPU."""
    rows, width = logits.shape
    blocks = triton.cdiv(width, SAMPLED)
    found = torch.empty(rows, blocks, 5, dtype=torch.float32, device=logits.device)
    _sample[(rows, blocks)](
        logits, keys, keys if least is None else least, found, logits.stride(0), first, real, temperature, inverse,
        BLOCK=SAMPLED, LANES=SAMPLED_LANES, FILTERED=least is not None, NOISY=temperature > 0,
        num_warps=SAMPLED_WARPS,
    )  # fmt: skip
    return found
