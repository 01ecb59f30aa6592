"""A step of Adam whose moments are in bf16 or 8 bits (optim/moments.py), in one pass over memory.

A program holds whole blocks, so their largest are found before anything is written. A code is found from the number
that has it: where `dynamic_code` would have it without rounding, then one place up or down by the table itself. So it
is the code that a search in the table gives, by two reads of it and, where decades meet, two more.
"""

from __future__ import annotations

from math import log

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from megalith.ops.kernels.adam_kernel import LEAST
from megalith.ops.kernels.kernel_launch import Launcher
from megalith.ops.kernels.loss_kernel import mix

ELEMENTS, WARPS = 2048, 8  # a program's part: as many blocks as it holds, one at least
FAR = tl.constexpr(1e-30)  # where the largest of a block is less, its reciprocal could be infinite
NO_LESS = tl.constexpr(1 + 2**-21)  # so that it has its own code, however its reciprocal rounds


@triton.jit
def _step(
    value, grad, first, first_scales, first_code, second, second_scales, second_code, step, settings, place,
    blocks, eps,
    BETA1: tl.constexpr, BETA2: tl.constexpr, LOG1: tl.constexpr, LOG2: tl.constexpr, ADDS_DECAY: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    if tl.load(settings + 3) == 0:  # found_inf
        lr, decay, age = tl.load(settings), tl.load(settings + 1), tl.load(step)
        unscaled = 1 / tl.load(settings + 2)
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        columns = tl.arange(0, COLUMNS)
        places = rows.to(tl.int64)[:, None] * BLOCK + columns[None, :]
        here, there = (rows < blocks)[:, None] & (columns < BLOCK)[None, :], rows < blocks
        x = tl.load(value + places, mask=here, other=0.0).to(tl.float32)
        g = tl.load(grad + places, mask=here, other=0.0).to(tl.float32) * unscaled
        if ADDS_DECAY:
            g += decay * x
        else:
            x -= lr * decay * x
        m = BETA1 * _widened(first, first_scales, first_code, places, here, rows, there) + (1 - BETA1) * g
        v = (
            BETA2 * _widened(second, second_scales, second_code, places, here, rows, there)
            + (1 - BETA2) * g * g
        )
        # Of 1 - beta^step nothing is lost while it is small.
        rate, corrected = -lr / libdevice.expm1(age * LOG1), -1 / libdevice.expm1(age * LOG2)
        x -= rate * m / (tl.sqrt(v * corrected) + eps)
        tl.store(value + places, x, mask=here)
        bits = _bits(place, age, rows, columns, BLOCK)
        _store(first, first_scales, first_code, m, bits & 0xFFFF, places, here, rows, there, True)
        _store(second, second_scales, second_code, v, bits >> 16, places, here, rows, there, False)


@triton.jit
def _widened(values, scales, code, places, here, rows, there):
    """A stored moment, fp32 [ROWS, COLUMNS]."""
    stored = tl.load(values + places, mask=here, other=0)
    if values.dtype.element_ty == tl.uint8:
        scale = tl.load(scales + rows, mask=there, other=0.0)
        return tl.load(code + stored.to(tl.int32)) * scale[:, None]
    else:
        return stored.to(tl.float32)


@triton.jit
def _store(values, scales, code, moment, random, places, here, rows, there, SIGNED: tl.constexpr):
    """Rounds a moment stochastically and stores it; `random`: 16 bits, uint32."""
    if values.dtype.element_ty == tl.uint8:
        moment = tl.where(here, moment, 0.0)
        largest = tl.max(tl.abs(moment), 1)
        tl.store(scales + rows, largest, mask=there)
        far = tl.where(largest < FAR, 1 / FAR, 1.0)
        inverse = NO_LESS / tl.where(largest > 0, largest * far, 1.0)
        x = moment * far[:, None] * inverse[:, None]
        codes = _coded(x, random, code, SIGNED)
        if not SIGNED:
            codes = tl.where(moment > 0, tl.maximum(codes, 1), 0)
        tl.store(values + places, codes.to(tl.uint8), mask=here)
    elif values.dtype.element_ty == tl.bfloat16:
        raw = moment.to(tl.uint32, bitcast=True) + random
        rounded = (raw & 0xFFFF0000).to(tl.float32, bitcast=True)
        tl.store(values + places, rounded.to(tl.bfloat16), mask=here)
    else:
        tl.store(values + places, moment, mask=here)


@triton.jit
def _coded(x, random, code, SIGNED: tl.constexpr):
    """The codes of numbers from -1 or 0 to 1, int32. Decades and places are those of optim.moments' `dynamic_code`."""
    ZERO: tl.constexpr = 127 if SIGNED else 0  # the code of 0
    LAST: tl.constexpr = 253 if SIGNED else 254  # that has another above it
    size, count = tl.abs(x), 64.0 if SIGNED else 128.0  # of codes in a decade, 0.1 to 1 the first
    small = size < 1e-4
    size, count = tl.where(small, size * 1e4, size), tl.where(small, count / 16, count)
    small = size < 1e-2
    size, count = tl.where(small, size * 100, size), tl.where(small, count / 4, count)
    small = size < 0.1
    size, count = tl.where(small, size * 10, size), tl.where(small, count / 2, count)
    among = (size - 0.1) * (count * (1 / 0.9)) - 0.5
    above = (count + tl.floor(among)).to(tl.int32) - (0 if SIGNED else 1)  # 0
    below = tl.where(x < 0, ZERO - 1 - above, ZERO + above)
    below = tl.minimum(tl.maximum(below, 0), LAST)
    low, high = tl.load(code + below), tl.load(code + below + 1)
    off = ((x < low) & (below > 0)) | ((x >= high) & (below < LAST))
    below += tl.where(off, tl.where(x < low, -1, 1), 0)
    low = tl.load(code + below, mask=off, other=low)
    high = tl.load(code + below + 1, mask=off, other=high)
    return below + (random.to(tl.float32) * (high - low) < (x - low) * 65536).to(tl.int32)


@triton.jit
def _bits(place, age, rows, columns, BLOCK: tl.constexpr):
    """optim.moments' random bits, uint32 [ROWS, COLUMNS]. Numbers wrap where those are cut to 32 bits."""
    key, first = tl.load(place).to(tl.uint32), tl.load(place + 1).to(tl.uint32)
    rows_here, rows_there = tl.load(place + 2).to(tl.int32), tl.load(place + 3).to(tl.uint32)
    in_a_row, column = tl.load(place + 4).to(tl.int32) // BLOCK, tl.load(place + 5).to(tl.uint32)
    row = rows // in_a_row
    whole = first + (row // rows_here).to(tl.uint32) * rows_there + (row % rows_here).to(tl.uint32)
    keys = mix(whole ^ mix(key ^ mix(age.to(tl.int64).to(tl.uint32))))
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
    place: Tensor,
    betas: tuple[float, float],
    adds_decay: bool,
    eps: float,
) -> None:
    """One step, in place, of contiguous tensors [blocks, block] on one GPU: `value`, of which `first` and `second` are
    the moments, each the stored values, and for 8 bits the scales [blocks, 1] and the code's table. The rest as in
    optim.moments' `_step`, whose arithmetic this is."""
    blocks, block = value.shape
    columns = triton.next_power_of_2(block)
    rows = max(1, ELEMENTS // columns)
    stored = [part if part is not None else kept[0] for kept in (first, second) for part in kept]
    _launch(
        (-(-blocks // rows), 1, 1),
        (value, grad, *stored, step, settings, place),
        (blocks,),
        (float(eps),),
        (*betas, *(log(beta or LEAST) for beta in betas), adds_decay, block, columns, rows),
        WARPS,
    )
