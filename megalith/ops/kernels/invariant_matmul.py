"""A matmul that computes each row independently of the other rows, their number and the tile sizes.

Every element is a sum along the inner dimension in one order: tensor cores add a product of 16 inner elements at a
time, whatever the shape of the tile, and nothing else is split. Sizes of tiles may therefore follow the number of rows.
`matmul_in_parts` divides the inner dimension into equal parts, whose sums are added in fp32 by a binary tree of
neighbours.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

BAND = 8  # rows of tiles that are computed at about the same time, so that they share weights in the L2 cache
FEW_ROWS, MANY_ROWS = 128, 1024  # per matrix
SUMMED = 1024  # elements per program
ALIGNED = 16  # bytes: addresses and strides of what the tensor memory accelerator reads


class Tile(NamedTuple):
    """Tile sizes of a program: rows and columns of the result, and inner elements per iteration."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int  # of loads under way


WIDE, WIDE_IN_PARTS = Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 4)
MIDDLE = Tile(64, 128, 64, 4, 4)
NARROW = Tile(64, 64, 64, 4, 5)
PLAIN = Tile(128, 128, 64, 8, 3)  # without the tensor memory accelerator
FLOAT32, FLOAT32_IN_PARTS = Tile(128, 128, 32, 8, 3), Tile(128, 64, 32, 8, 3)


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


@triton.jit
def _add_part(total, waiting, part, SIZE: tl.constexpr):
    # The binary tree of the parts: sums of one, two and four parts wait in memory for their neighbours. At least one
    # step lies between the store and the load of a sum, and each step has barriers for its shared memory. An explicit
    # barrier in the loop would keep Triton from loading ahead.
    if part % 2 == 0:
        tl.store(waiting, total)
    else:
        total = tl.load(waiting) + total
        if part % 4 == 1:
            tl.store(waiting + SIZE, total)
        else:
            total = tl.load(waiting + SIZE) + total
            if part % 8 == 3:
                tl.store(waiting + 2 * SIZE, total)
            else:
                total = tl.load(waiting + 2 * SIZE) + total
    return total


@triton.jit(do_not_specialize=["rows"])
def _matmul(
    x, weight, out, waiting, ends, rows,
    N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, SPREAD: tl.constexpr, GROUPS: tl.constexpr,
    GROUPED: tl.constexpr, DESCRIBED: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, INNER: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    size: tl.constexpr = K // PARTS
    steps: tl.constexpr = (size + INNER - 1) // INNER  # per part
    across: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    down = tl.cdiv(rows, ROWS) + GROUPS - 1
    own_part = tl.program_id(1)  # 0 unless each program computes one part
    own_tile = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    waiting += tl.program_id(0).to(tl.int64) * (3 * ROWS * COLUMNS) + own_tile
    inner = tl.arange(0, INNER)
    for number in range(tl.program_id(0), down * across, tl.num_programs(0)):
        band = number // (BAND * across)
        height = min(down - band * BAND, BAND)
        in_band = number % (BAND * across)
        group, first, end = _tile(band * BAND + in_band % height, ends, rows, GROUPS, GROUPED, ROWS)
        if first < end:
            first_column = in_band // height * COLUMNS
            row = (first + tl.arange(0, ROWS)).to(tl.int64)
            column = first_column + tl.arange(0, COLUMNS)
            inside = (row < end)[:, None] & (column < N)[None, :]
            total = tl.zeros([ROWS, COLUMNS], tl.float32)
            for step in range(steps if SPREAD else steps * PARTS):
                at = own_part * size + step // steps * size + step % steps * INNER
                if DESCRIBED:
                    a = x.load([first, at])
                    b = weight.load([group * N + first_column, at]).T
                else:
                    near = inner < size - step % steps * INNER
                    a = tl.load(
                        x + row[:, None] * K + at + inner[None, :],
                        mask=(row < end)[:, None] & near[None, :],
                        other=0.0,
                    )
                    b = tl.load(
                        weight + group.to(tl.int64) * (N * K) + column[None, :] * K + at + inner[:, None],
                        mask=near[:, None] & (column < N)[None, :],
                        other=0.0,
                    )
                total = tl.dot(a, b, total, input_precision=PRECISION)
                if PARTS > 1 and not SPREAD:  # noqa: SIM102 (known to the compiler, unlike the next)
                    if step % steps == steps - 1:
                        part = step // steps
                        total = _add_part(total, waiting, part, ROWS * COLUMNS)
                        if part < PARTS - 1:
                            total = tl.zeros([ROWS, COLUMNS], tl.float32)
            target = out + own_part.to(tl.int64) * rows * N + row[:, None] * N + column[None, :]
            tl.store(target, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _two(parts, size, inside):
    return tl.load(parts, mask=inside, other=0.0) + tl.load(parts + size, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["rows"])
def _sum_parts(parts, out, rows, N: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    stride = rows.to(tl.int64) * N
    inside = index < stride
    parts += index
    total = _two(parts, stride, inside)
    if PARTS > 2:
        total += _two(parts + 2 * stride, stride, inside)
    if PARTS > 4:
        total += _two(parts + 4 * stride, stride, inside) + _two(parts + 6 * stride, stride, inside)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=inside)


def tiled_matmul(x: Tensor, weight: Tensor, dtype: torch.dtype, ends: Tensor | None = None) -> Tensor:
    """Return x · weightᵀ, [rows, out].

    Args:
        x: [rows, in].
        weight: [out, in], or with `ends` one matrix per group, [groups, out, in].
        dtype: dtype of the result.
        ends: int32 [groups], end of each group's rows. Rows after the last group are undefined.
    """
    return matmul_in_parts(x, weight, dtype, 1, ends)


def matmul_in_parts(
    x: Tensor, weight: Tensor, dtype: torch.dtype, parts: int, ends: Tensor | None = None
) -> Tensor:
    """Compute x · weightᵀ, [rows, out], and sum the products of equal chunks of the inner dimension by a binary tree.

    Args:
        x: [rows, in].
        weight: [out, in], or with `ends` one matrix per group, [groups, out, in].
        dtype: dtype of the result.
        parts: 1, 2, 4 or 8, a divisor of `in`.
        ends: int32 [groups], end of each group's rows. Rows after the last group are undefined.
    """
    x, weight = x.contiguous(), weight.contiguous()
    rows, groups = len(x), 1 if ends is None else len(ends)
    described = has_descriptors(x, weight, parts)
    if x.dtype == torch.float32:
        tile = FLOAT32_IN_PARTS if parts > 1 else FLOAT32
    elif not described:
        tile = NARROW if parts > 1 else PLAIN
    elif parts > 1:
        tile = WIDE_IN_PARTS if rows > MANY_ROWS * groups else NARROW
    else:  # a narrow tile where wider ones would leave SMs idle
        columns, sms = weight.shape[-2], _major_and_sms(x.device)[1]
        wide = triton.cdiv(rows, WIDE.rows) * triton.cdiv(columns, WIDE.columns)
        few = columns * rows <= MIDDLE.rows * 4096
        tile = WIDE if rows > MIDDLE.rows * groups and wide >= sms else NARROW if few else MIDDLE
    spread = parts > 1 and ends is None and rows <= FEW_ROWS
    return multiply(x, weight, dtype, parts, ends, tile, described, spread)


def has_descriptors(x: Tensor, weight: Tensor, parts: int) -> bool:
    """Return True if the GPU's tensor memory accelerator can read both contiguous matrices in steps of 64 elements."""
    aligned = (x.data_ptr() | weight.data_ptr()) % ALIGNED == 0
    fits = x.dtype.itemsize == 2 and x.shape[1] % (64 * parts) == 0
    return aligned and fits and x.is_cuda and _major_and_sms(x.device)[0] >= 9


@cache
def _major_and_sms(device: torch.device) -> tuple[int, int]:
    """Return the major compute capability of a GPU and the number of its SMs."""
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.multi_processor_count


def multiply(
    x: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    parts: int,
    ends: Tensor | None,
    tile: Tile,
    described: bool,
    spread: bool,
) -> Tensor:
    """Return x · weightᵀ as `matmul_in_parts` does. The last three arguments change the time, not the result.

    Args:
        x, weight, dtype, parts, ends: as in `matmul_in_parts`, contiguous.
        tile: sizes of a program's tile.
        described: read x and the weight with the tensor memory accelerator.
        spread: compute each part in programs of its own, which helps if there are few rows.
    """
    (rows, inner), columns = x.shape, weight.shape[-2]
    groups = 1 if ends is None else len(ends)
    shape = (parts, rows, columns) if spread else (rows, columns)
    out = torch.empty(shape, dtype=torch.float32 if spread else dtype, device=x.device)
    if not out.numel():
        return torch.empty(rows, columns, dtype=dtype, device=x.device)
    programs = (triton.cdiv(rows, tile.rows) + groups - 1) * triton.cdiv(columns, tile.columns)
    waiting = out
    if parts > 1 and not spread:
        programs = min(programs, _major_and_sms(x.device)[1] * (16 // tile.warps) if x.is_cuda else programs)
        waiting = torch.empty(programs * 3 * tile.rows * tile.columns, dtype=torch.float32, device=x.device)
    left, right = x, weight
    if described:
        left = TensorDescriptor.from_tensor(x, [tile.rows, tile.inner])
        right = TensorDescriptor.from_tensor(weight.flatten(0, -2), [tile.columns, tile.inner])
    _matmul[(programs, parts if spread else 1)](
        left, right, out, waiting, x if ends is None else ends, rows,
        columns, inner, parts, spread, groups, ends is not None, described,
        "ieee" if x.dtype == torch.float32 else "tf32", *tile[:3], BAND, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if not spread:
        return out
    summed = torch.empty(rows, columns, dtype=dtype, device=x.device)
    _sum_parts[(triton.cdiv(summed.numel(), SUMMED),)](out, summed, rows, columns, parts, SUMMED)
    return summed
