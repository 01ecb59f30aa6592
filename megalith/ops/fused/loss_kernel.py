"""Softmax cross-entropy of a chunk of logits: losses, and gradients in the place of the logits, by one kernel.

A program has a row. It reads it twice, first for the sum of exponentials and then to make the gradient; the second
time it comes from the cache in part, for a row of 50,304 entries is 100 KB. The sum is taken as the entries come,
relative to the largest that each lane has seen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, LANES, WARPS = 4, 2048, 8  # entries at a time: ROWS for each of the LANES


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
    losses = torch.empty_like(weight)
    _softmax_loss[(tokens,)](
        logits, index, weight, losses, min(real, rows), WIDTH=rows, ROWS=ROWS, LANES=LANES, num_warps=WARPS
    )
    return losses
