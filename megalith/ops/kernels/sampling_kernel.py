"""Sampling in one pass over the logits: computes the maximum of logit + temperature · noise, and the softmax sum.

Each program handles a block of a row and finds five numbers (ops/gumbel.py), which are then combined over the blocks of
a row and, under tensor parallelism, over ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SAMPLED, SAMPLED_LANES, SAMPLED_WARPS = 4096, 1024, 4  # entries per block, lanes, warps


@triton.jit
def mix(h):
    """ops.dropout.mix for uint32."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _noise(keys):
    """Return −log of ops.gumbel.exponential for keys, uint32."""
    bits = (mix(keys) & 0x7FFFFFFF).to(tl.int32)
    v = (bits.to(tl.float32) + 0.5) * 4.656612873077393e-10
    near = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5)))))
    return -tl.log(tl.where(v < 0.0625, near, -tl.log(1 - v)))


@triton.jit
def _sample(
    logits, keys, least, temperatures, out, row_stride, first, real, temperature, inverse,
    BLOCK: tl.constexpr, LANES: tl.constexpr, FILTERED: tl.constexpr, NOISY: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    row, block, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    logits += row.to(tl.int64) * row_stride
    key = tl.load(keys + row).to(tl.uint32, bitcast=True)
    of_row = tl.load(temperatures + row) if BY_ROW else 1.0
    lanes = tl.arange(0, LANES)
    best = tl.full([LANES], float("-inf"), tl.float32)
    best_column, best_logit = best, best
    largest, total = tl.full([LANES], -1e30, tl.float32), tl.zeros([LANES], tl.float32)
    for begin in tl.static_range(0, BLOCK, LANES):
        columns = block * BLOCK + begin + lanes
        z = tl.load(logits + columns, mask=columns < real, other=float("-inf")).to(tl.float32)
        if BY_ROW:
            z = tl.div_rn(z, tl.where(of_row == 0, 1.0, of_row))
        if FILTERED:
            z = tl.where(z >= tl.load(least + row), z, float("-inf"))
        noisy = z
        if NOISY:
            noisy = z + temperature * _noise(key ^ mix((first + columns).to(tl.uint32)))
            if BY_ROW:
                noisy = tl.where(of_row == 0, z, noisy)
        better = noisy > best
        best_column, best_logit = (
            tl.where(better, columns.to(tl.float32), best_column),
            tl.where(better, z, best_logit),
        )
        best = tl.maximum(best, noisy)
        new_largest = tl.maximum(largest, z)
        total = total * tl.exp((largest - new_largest) * inverse) + tl.exp((z - new_largest) * inverse)
        largest = new_largest
    peak, top = tl.max(best, 0), tl.max(largest, 0)
    index = tl.min(tl.where(best == peak, best_column, float("inf")), 0)
    chosen = tl.max(tl.where(best_column == index, best_logit, float("-inf")), 0)
    sums = tl.sum(total * tl.exp((largest - top) * inverse), 0)
    out += (row * blocks + block) * 5
    tl.store(out, peak)
    tl.store(out + 1, index + first)
    tl.store(out + 2, chosen)
    tl.store(out + 3, top)
    tl.store(out + 4, sums)


def sampled_blocks(
    logits: Tensor,
    keys: Tensor,
    least: Tensor | None,
    first: int,
    real: int,
    temperature: float,
    inverse: float,
    temperatures: Tensor | None = None,
) -> Tensor:
    """Return statistics of blocks of logits for sampling; see ops.gumbel.sampled_blocks.

    With `temperatures`, float32 [rows], each row's logits are divided by its own. A row with temperature 0 gets no
    noise and is not divided. `temperature` and `inverse` are then 1.
    """
    rows, width = logits.shape
    keys = keys.contiguous()
    least = None if least is None else least.contiguous()  # top_k's is a column
    temperatures = None if temperatures is None else temperatures.contiguous()
    blocks = triton.cdiv(width, SAMPLED)
    out = torch.empty(rows, blocks, 5, dtype=torch.float32, device=logits.device)
    _sample[(rows, blocks)](
        logits, keys, keys if least is None else least, keys if temperatures is None else temperatures, out,
        logits.stride(0), first, real, temperature, inverse,
        BLOCK=SAMPLED, LANES=SAMPLED_LANES, FILTERED=least is not None, NOISY=temperature > 0,
        BY_ROW=temperatures is not None, num_warps=SAMPLED_WARPS,
    )  # fmt: skip
    return out
