"""One pass over the logits that samples and sums: the largest of logit + temperature · noise, and the softmax's sum.

A program has a block of a row. What it finds are five numbers (ops/gumbel.py), which are then put together over the
blocks of a row and, under tensor parallelism, over the ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, LANES, WARPS = 4096, 1024, 4


@triton.jit
def _mix(h):
    """ops.dropout.mix, of uint32."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _noise(keys):
    """−log of ops.gumbel.exponential of the keys, uint32."""
    bits = (_mix(keys) & 0x7FFFFFFF).to(tl.int32)
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
            noisy = z + temperature * _noise(key ^ _mix((first + columns).to(tl.uint32)))
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
    blocks = triton.cdiv(width, BLOCK)
    found = torch.empty(rows, blocks, 5, dtype=torch.float32, device=logits.device)
    _sample[(rows, blocks)](
        logits, keys, keys if least is None else least, found, logits.stride(0), first, real, temperature, inverse,
        BLOCK=BLOCK, LANES=LANES, FILTERED=least is not None, NOISY=temperature > 0, num_warps=WARPS,
    )  # fmt: skip
    return found
