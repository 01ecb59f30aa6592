"""Adam step with moments in bf16 or 8 bits (optim/moments.py), in one pass over memory.

A program handles complete blocks, so that their largest elements are known before anything is written. The 8-bit code
of a number is first computed by a formula that ignores rounding of the table `dynamic_code`, then corrected by at most
one using the table. The result is the code that a search in the table would find. It takes two reads of the table, and
two more at decade boundaries.
"""

from __future__ import annotations

from math import log

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from megalith.ops.kernels.adam_kernel import MIN_BETA
from megalith.ops.kernels.kernel_launch import Launcher
from megalith.ops.kernels.sampling_kernel import mix

ELEMENTS, WARPS = 2048, 8  # per program, in complete blocks, at least one
FAR = tl.constexpr(1e-30)  # the reciprocal of a smaller maximum could overflow
NO_LESS = tl.constexpr(1 + 2**-21)  # keeps the maximum's code exact, however its reciprocal is rounded


@triton.jit
def _step(
    value, grad, first, first_scales, first_code, second, second_scales, second_code, step, settings, position,
    blocks, eps,
    BETA1: tl.constexpr, BETA2: tl.constexpr, LOG1: tl.constexpr, LOG2: tl.constexpr, COUPLED_DECAY: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    if tl.load(settings + 3) == 0:  # found_inf
        lr, decay, age = tl.load(settings), tl.load(settings + 1), tl.load(step)
        unscaled = 1 / tl.load(settings + 2)
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        columns = tl.arange(0, COLUMNS)
        offsets = rows.to(tl.int64)[:, None] * BLOCK + columns[None, :]
        mask, row_mask = (rows < blocks)[:, None] & (columns < BLOCK)[None, :], rows < blocks
        x = tl.load(value + offsets, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32) * unscaled
        if COUPLED_DECAY:
            g += decay * x
        else:
            x -= lr * decay * x
        m = BETA1 * _widened(first, first_scales, first_code, offsets, mask, rows, row_mask) + (1 - BETA1) * g
        v = (
            BETA2 * _widened(second, second_scales, second_code, offsets, mask, rows, row_mask)
            + (1 - BETA2) * g * g
        )
        # expm1 keeps 1 - beta^step exact while it is small.
        rate, correction2 = -lr / libdevice.expm1(age * LOG1), -1 / libdevice.expm1(age * LOG2)
        x -= rate * m / (tl.sqrt(v * correction2) + eps)
        tl.store(value + offsets, x, mask=mask)
        bits = _bits(position, age, rows, columns, BLOCK)
        _store(first, first_scales, first_code, m, bits & 0xFFFF, offsets, mask, rows, row_mask, True)
        _store(second, second_scales, second_code, v, bits >> 16, offsets, mask, rows, row_mask, False)


@triton.jit
def _widened(values, scales, code, offsets, mask, rows, row_mask):
    """Return a stored moment, fp32 [ROWS, COLUMNS]."""
    stored = tl.load(values + offsets, mask=mask, other=0)
    if values.dtype.element_ty == tl.uint8:
        scale = tl.load(scales + rows, mask=row_mask, other=0.0)
        return tl.load(code + stored.to(tl.int32)) * scale[:, None]
    else:
        return stored.to(tl.float32)


@triton.jit
def _store(values, scales, code, moment, random, offsets, mask, rows, row_mask, SIGNED: tl.constexpr):
    """Round a moment stochastically and store it. `random` has 16 bits, uint32."""
    if values.dtype.element_ty == tl.uint8:
        moment = tl.where(mask, moment, 0.0)
        largest = tl.max(tl.abs(moment), 1)
        tl.store(scales + rows, largest, mask=row_mask)
        far = tl.where(largest < FAR, 1 / FAR, 1.0)
        inverse = NO_LESS / tl.where(largest > 0, largest * far, 1.0)
        x = moment * far[:, None] * inverse[:, None]
        codes = _coded(x, random, code, SIGNED)
        if not SIGNED:
            codes = tl.where(moment > 0, tl.maximum(codes, 1), 0)
        tl.store(values + offsets, codes.to(tl.uint8), mask=mask)
    elif values.dtype.element_ty == tl.bfloat16:
        raw = moment.to(tl.uint32, bitcast=True) + random
        rounded = (raw & 0xFFFF0000).to(tl.float32, bitcast=True)
        tl.store(values + offsets, rounded.to(tl.bfloat16), mask=mask)
    else:
        tl.store(values + offsets, moment, mask=mask)


@triton.jit
def _coded(x, random, code, SIGNED: tl.constexpr):
    """Return int32 codes of numbers in [-1, 1] (`SIGNED`) or [0, 1], rounded stochastically. See
    optim.moments.dynamic_code.
    """
    ZERO: tl.constexpr = 127 if SIGNED else 0  # the code of 0
    LAST: tl.constexpr = 253 if SIGNED else 254  # last code with a successor
    size, count = tl.abs(x), 64.0 if SIGNED else 128.0  # codes per decade, beginning with 0.1 to 1
    small = size < 1e-4
    size, count = tl.where(small, size * 1e4, size), tl.where(small, count / 16, count)
    small = size < 1e-2
    size, count = tl.where(small, size * 100, size), tl.where(small, count / 4, count)
    small = size < 0.1
    size, count = tl.where(small, size * 10, size), tl.where(small, count / 2, count)
    fraction_index = (size - 0.1) * (count * (1 / 0.9)) - 0.5
    above = (count + tl.floor(fraction_index)).to(tl.int32) - (0 if SIGNED else 1)  # 0
    below = tl.where(x < 0, ZERO - 1 - above, ZERO + above)
    below = tl.minimum(tl.maximum(below, 0), LAST)
    low, high = tl.load(code + below), tl.load(code + below + 1)
    is_off = ((x < low) & (below > 0)) | ((x >= high) & (below < LAST))
    below += tl.where(is_off, tl.where(x < low, -1, 1), 0)
    low = tl.load(code + below, mask=is_off, other=low)
    high = tl.load(code + below + 1, mask=is_off, other=high)
    return below + (random.to(tl.float32) * (high - low) < (x - low) * 65536).to(tl.int32)


@triton.jit
def _bits(position, age, rows, columns, BLOCK: tl.constexpr):
    """Return the random bits that optim.moments computes, uint32 [ROWS, COLUMNS]. Here the integers wrap around."""
    key, first = tl.load(position).to(tl.uint32), tl.load(position + 1).to(tl.uint32)
    rows_here, rows_there = tl.load(position + 2).to(tl.int32), tl.load(position + 3).to(tl.uint32)
    in_a_row, column = tl.load(position + 4).to(tl.int32) // BLOCK, tl.load(position + 5).to(tl.uint32)
    row = rows // in_a_row
    global_row = first + (row // rows_here).to(tl.uint32) * rows_there + (row % rows_here).to(tl.uint32)
    keys = mix(global_row ^ mix(key ^ mix(age.to(tl.int64).to(tl.uint32))))
    at = column + ((rows % in_a_row) * BLOCK).to(tl.uint32)[:, None] + columns.to(tl.uint32)[None, :]
    return mix(keys[:, None] ^ (at * 0x9E3779B1))


_launch = Launcher(_step)


def step_moments_(
    value: Tensor,
    grad: Tensor,
    first: tuple[Tensor, Tensor | None, Tensor | None],
    second: tuple[Tensor, Tensor | None, Tensor | None],
    step: Tensor,
    settings: Tensor,
    position: Tensor,
    betas: tuple[float, float],
    coupled_decay: bool,
    eps: float,
) -> None:
    """Update contiguous tensors [blocks, block] on one GPU in place: `value`, with moments `first` and `second`.

    A moment consists of the stored values and, for 8 bits, of scales [blocks, 1] and the code's table.

    See `_step` in optim.moments for the arithmetic and the other arguments.
    """
    blocks, block = value.shape
    columns = triton.next_power_of_2(block)
    rows = max(1, ELEMENTS // columns)
    stored = [
        part if part is not None else moment_parts[0]
        for moment_parts in (first, second)
        for part in moment_parts
    ]
    _launch(
        (-(-blocks // rows), 1, 1),
        (value, grad, *stored, step, settings, position),
        (blocks,),
        (float(eps),),
        (*betas, *(log(beta or MIN_BETA) for beta in betas), coupled_decay, block, columns, rows),
        WARPS,
    )
