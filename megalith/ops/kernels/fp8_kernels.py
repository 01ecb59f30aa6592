"""Casts to FP8. A matrix is read once, and one program writes its data, the transposed data and the amax.

Programs handle tiles of ROWS × COLUMNS. Hopper needs operands contiguous along the summed dimension, and the three
matmuls of a linear layer sum along different dimensions, so the data is needed in both orders. The amax is a maximum
over the bits of |x| as integers, which have the same order as the numbers, with infinity and then NaN above them all.

bf16 is transposed in shared memory before it is cast, and so read once. For fp32, Triton 3.6 would transpose the data
instead if it is also stored by row, with wrong results, so this takes two launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalith.ops.kernels.kernel_launch import Launcher

ROWS, COLUMNS, WARPS = 64, 128, 4  # tile of a cast
SIDE, TRANSPOSE_WARPS = 128, 8  # tile of a transpose
AMAX_ELEMENTS, AMAX_WARPS = 16384, 8
BLOCK, BLOCK_WARPS = tl.constexpr(128), 8
_ABSOLUTE, _INFINITY = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7F800000)


@triton.jit
def _cast(
    x, scale, codes, transposed, running_amax, rows, columns,
    LARGEST: tl.constexpr, BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr, RECORDS: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    if EVEN:
        value = tl.load(x + row * columns + column).to(tl.float32)
    else:
        mask = (row < rows) & (column < columns)
        value = tl.load(x + row * columns + column, mask=mask, other=0.0).to(tl.float32)
    if RECORDS:
        _record(running_amax, value)
    code = _code(value * tl.load(scale), LARGEST, codes.dtype.element_ty)
    if EVEN:
        if BY_ROW:
            tl.store(codes + row * columns + column, code)
        if BY_COLUMN:
            tl.store(transposed + tl.trans(column) * rows + tl.trans(row), tl.trans(code))
    else:
        if BY_ROW:
            tl.store(codes + row * columns + column, code, mask=mask)
        if BY_COLUMN:
            tl.store(
                transposed + tl.trans(column) * rows + tl.trans(row), tl.trans(code), mask=tl.trans(mask)
            )


@triton.jit
def _amax(x, running_amax, count, ELEMENTS: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    value = tl.load(x + offsets, mask=offsets < count, other=0.0).to(tl.float32)
    tl.atomic_max(running_amax, tl.max(value.to(tl.int32, bitcast=True) & _ABSOLUTE, 0))


@triton.jit
def _transpose(x, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    mask = (row < rows) & (column < columns)
    code = tl.load(x + row * columns + column, mask=mask, other=0)
    tl.store(out + tl.trans(column) * rows + tl.trans(row), tl.trans(code), mask=tl.trans(mask))


@triton.jit
def _cast_blocks(
    x, codes, inverses, transposed, inverses_t, rows, columns,
    LARGEST: tl.constexpr, BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    # A tile is one block of 128 × 128, or 128 blocks in each direction.
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    value = tl.load(x + row[:, None] * columns + column[None, :]).to(tl.float32)
    bits = value.to(tl.int32, bitcast=True) & _ABSOLUTE
    by_row, by_column = tl.max(bits, 1), tl.max(bits, 0)
    pointers_t = transposed + column[:, None] * rows + row[None, :]
    if TILES:
        scale, inverse = _power_of_two(tl.max(by_row, 0))
        code = _code(value * scale, LARGEST, codes.dtype.element_ty)
        if BY_ROW:
            tl.store(codes + row[:, None] * columns + column[None, :], code)
        tl.store(inverses + tl.program_id(0) * (columns // BLOCK) + tl.program_id(1), inverse)
        if BY_COLUMN:
            tl.store(pointers_t, tl.trans(code))
    else:
        if BY_ROW:
            scale, inverse = _power_of_two(by_row)
            code = _code(value * scale[:, None], LARGEST, codes.dtype.element_ty)
            tl.store(codes + row[:, None] * columns + column[None, :], code)
            tl.store(inverses + tl.program_id(1) * rows + row, inverse)
        if BY_COLUMN:
            scale, inverse = _power_of_two(by_column)
            code = _code(value * scale[None, :], LARGEST, codes.dtype.element_ty)
            tl.store(pointers_t, tl.trans(code))
            tl.store(inverses_t + tl.program_id(0) * columns + column, inverse)


@triton.jit
def _record(running_amax, value):
    bits = value.to(tl.int32, bitcast=True) & _ABSOLUTE
    tl.atomic_max(running_amax, tl.max(tl.max(bits, 1), 0))


@triton.jit
def _code(scaled, LARGEST: tl.constexpr, dtype: tl.constexpr):
    scaled = tl.where(scaled > LARGEST, LARGEST, scaled)  # NaN stays
    return tl.where(scaled < -LARGEST, -LARGEST, scaled).to(dtype)


@triton.jit
def _power_of_two(amax):
    """Return 448 / amax rounded down to a power of two, from the bits of amax, and its inverse; see
    fp8.power_of_two."""
    exponent, mantissa = amax >> 23, amax & 0x7FFFFF
    power = 8 - (exponent - 127) - (mantissa > 0x600000).to(tl.int32)  # 448 = 1.75 · 2⁸
    power = tl.where(power > 127, 127, power)
    power = tl.where(amax == 0, 0, power)
    scale = (power + 127) << 23
    inverse = tl.where(power == 127, 0x400000, (127 - power) << 23)  # 2⁻¹²⁷ is subnormal
    scale, inverse = scale.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)
    finite = amax < _INFINITY
    return tl.where(finite, scale, float("nan")), tl.where(finite, inverse, float("nan"))


_launch_cast, _launch_amax, _launch_transpose, _launch_blocks = (
    Launcher(kernel) for kernel in (_cast, _amax, _transpose, _cast_blocks)
)


def cast(
    x: Tensor, scale: Tensor, running_amax: Tensor | None, dtype: torch.dtype, by_row: bool, by_column: bool
) -> tuple[Tensor, Tensor]:
    """Return the FP8 data of x [m, n] and its transpose [n, m]; see ops.fp8.codes.cast.

    The maximum of |x| is merged into `running_amax`.
    """
    if by_column and x.dtype == torch.float32:
        codes, none = cast(x, scale, running_amax, dtype, True, False)
        return codes if by_row else none, transpose(codes)
    x = x.contiguous()
    rows, columns = x.shape
    codes = x.new_empty(x.shape if by_row else 0, dtype=dtype)
    transposed = x.new_empty((columns, rows) if by_column else 0, dtype=dtype)
    if x.numel():
        _launch_cast(
            (-(-rows // ROWS), -(-columns // COLUMNS), 1),
            (x, scale, codes, transposed, scale if running_amax is None else running_amax.view(torch.int32)),
            (rows, columns),
            (),
            (torch.finfo(dtype).max, by_row, by_column, running_amax is not None,
             rows % ROWS == 0 and columns % COLUMNS == 0, ROWS, COLUMNS),
            WARPS,
        )  # fmt: skip
    return codes, transposed


def amax(x: Tensor) -> Tensor:
    """Return the maximum of |x|, a float32 scalar, NaN if x contains one."""
    x = x.contiguous()
    result = torch.zeros((), dtype=torch.int32, device=x.device)
    if x.numel():
        grid = (-(-x.numel() // AMAX_ELEMENTS), 1, 1)
        _launch_amax(grid, (x, result), (x.numel(),), (), (AMAX_ELEMENTS,), AMAX_WARPS)
    return result.view(torch.float32)


def transpose(codes: Tensor) -> Tensor:
    """Transpose one-byte data [m, n] to [n, m]."""
    rows, columns = codes.shape
    out = codes.new_empty(columns, rows)
    if codes.numel():
        _launch_transpose(
            (-(-rows // SIDE), -(-columns // SIDE), 1),
            (codes.contiguous().view(torch.uint8), out.view(torch.uint8)),
            (rows, columns),
            (),
            (SIDE, SIDE),
            TRANSPOSE_WARPS,
        )
    return out


def cast_blocks(
    x: Tensor, by_row: bool, by_column: bool, tiles: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the FP8 data and scales of blocks; see ops.fp8.codes.cast_blocks.

    Incomplete blocks of rows are supported only for data by row.
    """
    dtype, (rows, columns), size = torch.float8_e4m3fn, x.shape, BLOCK.value
    if rows % size:
        padded = torch.nn.functional.pad(x, (0, 0, 0, -rows % size))
        codes, inverses, *none = cast_blocks(padded, True, False, False)
        return codes[:rows], inverses[:, :rows].contiguous(), *none
    if tiles and by_column and x.dtype == torch.float32:
        codes, inverses, _, none = cast_blocks(x, True, False, True)
        return codes, inverses, transpose(codes), none
    x = x.contiguous()
    codes = x.new_empty(x.shape if by_row else 0, dtype=dtype)
    transposed = x.new_empty((columns, rows) if by_column else 0, dtype=dtype)
    if tiles:
        shapes = (rows // size, columns // size), 0
    else:
        shapes = (columns // size, rows) if by_row else 0, (rows // size, columns) if by_column else 0
    inverses, inverses_t = (x.new_empty(shape, dtype=torch.float32) for shape in shapes)
    _launch_blocks(
        (rows // size, columns // size, 1),
        (x, codes, inverses, transposed, inverses_t),
        (rows, columns),
        (),
        (torch.finfo(dtype).max, by_row, by_column, tiles),
        BLOCK_WARPS,
    )
    return codes, inverses, transposed, inverses_t
