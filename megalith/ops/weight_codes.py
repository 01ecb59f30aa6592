"""Frozen weights quantized to 4 or 8 bits (codes), and their dequantization for matmuls.

nf4    4-bit NormalFloat (QLoRA, Dettmers et al. 2023) with double quantization, in bitsandbytes' tables and blocks: 64
       values share an absmax. Absmaxes are stored as 8-bit codes of their differences from the matrix's mean; 256 of
       them share an fp32 scale
mxfp4  e2m1, one power of two per 32 values (OCP Microscaling Formats 1.0)
fp8    e4m3, one scale per block of 128 × 128
int8   one scale per row

All dequantize with elementwise PyTorch operations on any device, so a compiled layer dequantizes in one kernel. A
weight may combine several matrices of a Hugging Face model (queries, keys and values), each quantized separately, with
its rows in any order. Each row has its own quantized values and, in some formats, its own scales. Scales shared by rows
are in a table, and `block_index` holds each row's index into it. Any rows, and any complete blocks of columns, can
therefore be sliced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = {"nf4": 64, "mxfp4": 32}  # values in a row that share a scale
ABSMAX_BLOCK = 256  # absmaxes that share a scale in double quantization
FP8_BLOCK = 128
EXPONENT_OFFSET = 127
MANTISSA_BITS = 23  # of a float32

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 numbers of NF4: quantiles of a normal distribution, as bitsandbytes has them."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4 = (*E2M1, *(-value for value in E2M1))


def dynamic_map() -> Tensor:
    """Return the 256 values of bitsandbytes' signed dynamic 8-bit type, float32, ascending (Dettmers 2015).

    The position of the first bit that is set is a decimal exponent from -6 to 0; the bits after it divide a decade.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        ends = torch.linspace(0.1, 1, 2**exponent + 1)
        means = (ends[:-1] + ends[1:]) / 2.0
        values += (10 ** (exponent - 6) * means).tolist() + (-(10 ** (exponent - 6)) * means).tolist()
    return torch.tensor(sorted(values))


class WeightCodes(NamedTuple):
    """A quantized weight [..., rows, columns]. Tensors that a format does not use are empty."""

    codes: Tensor  # [..., rows, columns], or two per byte [..., rows, columns / 2]
    scales: Tensor  # [..., rows, blocks]: nf4 uint8 or float32, mxfp4 uint8, int8 float32
    block_index: Tensor  # int32 [..., rows]: nf4: index of the row's first absmax; fp8: row of `table`
    table: Tensor  # float32: nf4 [groups of absmaxes, 2], scale and mean; fp8 [blocks of rows, blocks of columns]
    levels: Tensor  # float32: the values of the codes, and in nf4 those of the absmaxes' codes

    def to(self, device: torch.device) -> WeightCodes:
        return WeightCodes(*(part.to(device) for part in self))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self)


@dataclass(frozen=True)
class CodedMatrix:
    """One quantized matrix [rows, columns], and the indices of its rows in the full weight."""

    rows: Tensor  # int64 [rows]
    codes: Tensor
    scales: Tensor | None = None
    block_index: Tensor | None = None
    table: Tensor | None = None


def coded_bytes(form: str, shape: Sequence[int]) -> int:
    """Return the size in bytes of a quantized weight [..., rows, columns]: quantized values and scales, without the
    fixed tables.
    """
    *_, columns = shape
    rows = math.prod(shape[:-1])
    if form == "int8":
        return rows * columns + 4 * rows
    if form == "fp8":
        return rows * columns + 4 * rows + 4 * math.ceil(rows / FP8_BLOCK) * math.ceil(columns / FP8_BLOCK)
    blocks = rows * columns // BLOCK[form]
    shared = 4 * rows + 8 * math.ceil(blocks / ABSMAX_BLOCK) if form == "nf4" else 0
    return rows * columns // 2 + blocks + shared


def levels_of(form: str) -> Tensor:
    """Return the values of a format's code book, by code (`WeightCodes.levels`). Empty for fp8 and int8."""
    if form == "nf4":
        return torch.cat([torch.tensor(NF4), dynamic_map()])
    return torch.tensor(MXFP4 if form == "mxfp4" else ())


def encode(form: str, matrix: Tensor, rows: Tensor) -> CodedMatrix:
    """Quantize a float32 matrix [rows, columns]. `rows`, int64 [rows], are its row indices in the weight."""
    if form == "nf4":
        return nf4_matrix(rows, *_nf4_codes(matrix))
    if form == "mxfp4":
        return CodedMatrix(rows, *_mxfp4_codes(matrix))
    if form == "int8":
        return CodedMatrix(rows, *int8_codes(matrix))
    return fp8_matrix(rows, *fp8_codes(matrix))


def nf4_matrix(rows: Tensor, codes: Tensor, absmax: Tensor) -> CodedMatrix:
    """Return an NF4 matrix from 4-bit codes, uint8 [rows, columns / 2], and float32 absmaxes [rows, columns / 64]."""
    mean = absmax.mean()
    flat = (absmax - mean).flatten()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % ABSMAX_BLOCK)).view(-1, ABSMAX_BLOCK)
    scale = padded.abs().amax(1)
    levels = dynamic_map().to(flat.device)
    ratio = (padded * (1 / _divisor(scale))[:, None]).flatten()[: len(flat)]
    below = (torch.bucketize(ratio, levels, right=True) - 1).clamp(0, len(levels) - 2)
    indices = below + (
        levels[below + 1] - ratio < ratio - levels[below]
    )  # the lower one of two that are as near
    return nested_nf4_matrix(rows, codes, indices.to(torch.uint8).view(absmax.shape), scale, mean)


def nested_nf4_matrix(
    rows: Tensor, codes: Tensor, absmax_codes: Tensor, scale: Tensor, mean: Tensor
) -> CodedMatrix:
    """Return an NF4 matrix from codes and the uint8 codes of its absmaxes [rows, columns / 64], whose scales and mean
    are float32."""
    first = torch.arange(len(codes), dtype=torch.int32, device=codes.device) * absmax_codes.shape[1]
    return CodedMatrix(rows, codes, absmax_codes, first, torch.stack([scale, mean.expand_as(scale)], dim=1))


def fp8_matrix(rows: Tensor, codes: Tensor, scales: Tensor) -> CodedMatrix:
    """Return an FP8 matrix from e4m3 data and float32 scales [rows / 128, columns / 128]."""
    first = torch.arange(len(codes), dtype=torch.int32, device=codes.device) // FP8_BLOCK
    return CodedMatrix(rows, codes, block_index=first, table=scales)


def assemble(form: str, shape: Sequence[int], matrices: Iterable[CodedMatrix]) -> WeightCodes:
    """Assemble a weight of shape [rows, columns] from the matrices that contain its rows."""
    matrices = list(matrices)
    first, parts = matrices[0], []
    for each in (first.codes, first.scales, first.block_index):
        size = (shape[0], *each.shape[1:]) if each is not None else (0,)
        like = first.codes if each is None else each
        parts.append(torch.empty(size, dtype=like.dtype, device=like.device))
    tables, before = [], 0
    for matrix in matrices:
        rows = matrix.rows.to(first.codes.device)
        _as_bytes(parts[0])[rows] = _as_bytes(matrix.codes)
        if matrix.scales is not None:
            parts[1][rows] = matrix.scales
        if matrix.block_index is not None:
            parts[2][rows] = matrix.block_index + before
            tables.append(matrix.table)
            before += len(matrix.table) * (ABSMAX_BLOCK if form == "nf4" else 1)
    table = torch.cat(tables) if tables else first.codes.new_empty(0, dtype=torch.float32)
    return WeightCodes(*parts, table, levels_of(form).to(table.device))


def stack(form: str, weights: Sequence[WeightCodes]) -> WeightCodes:
    """Return one weight, with experts as its first dimension, from the weights of several experts."""
    before, indices = 0, []
    for each in weights:
        indices.append(each.block_index + before)
        before += len(each.table) * (ABSMAX_BLOCK if form == "nf4" else 1)
    codes = torch.stack([_as_bytes(each.codes) for each in weights]).view(weights[0].codes.dtype)
    scales = torch.stack([each.scales for each in weights])
    table = torch.cat([each.table for each in weights])
    return WeightCodes(codes, scales, torch.stack(indices), table, weights[0].levels)


def take(form: str, weight: WeightCodes, rows: slice, columns: slice) -> WeightCodes:
    """Return the selected rows and columns of a weight, as contiguous copies. `columns` must start and stop at block
    boundaries.
    """
    codes, scales, block_index, table, levels = weight
    block = BLOCK.get(form)
    per_byte = 1 if block is None else 2
    codes = codes[..., rows, columns.start // per_byte : columns.stop // per_byte]
    if scales.numel():
        blocks = slice(None) if block is None else slice(columns.start // block, columns.stop // block)
        scales = scales[..., rows, blocks]
    if block_index.numel():
        block_index = block_index[..., rows]
        if block is not None:
            block_index = block_index + columns.start // block
    return WeightCodes(codes.clone(), scales.clone(), block_index.clone(), table, levels)


def decode(form: str, weight: WeightCodes, dtype: torch.dtype, first_column: int = 0) -> Tensor:
    """Return the weight [..., rows, columns] in `dtype`, computed in fp32 and rounded once.

    `first_column` is the index of the first column in the full weight.
    """
    codes, scales, block_index, table, levels = weight
    if form in BLOCK:
        halves = torch.stack([codes >> 4, codes & 15], dim=-1).flatten(-2)  # [..., rows, columns]
        values = levels[halves.long()].unflatten(-1, (-1, BLOCK[form]))
        factors = _absmax(weight) if form == "nf4" else _powers_of_two(scales)
        return (values * factors[..., None]).flatten(-2).to(dtype)
    if form == "int8":
        return (codes.float() * scales).to(dtype)
    columns = (first_column + torch.arange(codes.shape[-1], device=codes.device)) // FP8_BLOCK
    return (codes.float() * table[block_index.long()][..., columns]).to(dtype)


def _absmax(weight: WeightCodes) -> Tensor:
    """Return the absmaxes of NF4's blocks, float32 [..., rows, blocks]."""
    _, scales, block_index, table, levels = weight
    if scales.dtype == torch.float32:  # without double quantization
        return scales
    number = block_index[..., None] + torch.arange(scales.shape[-1], device=scales.device)
    shared = table[(number // ABSMAX_BLOCK).long()]  # [..., rows, blocks, 2]
    return levels[len(NF4) + scales.long()] * shared[..., 0] + shared[..., 1]


def _powers_of_two(exponents: Tensor) -> Tensor:
    """Return 2^(exponent - 127) for uint8 exponents below 255; 0 for the exponent 0."""
    return (exponents.to(torch.int32) << MANTISSA_BITS).view(torch.float32)


def _nf4_codes(matrix: Tensor) -> tuple[Tensor, Tensor]:
    blocks = matrix.unflatten(1, (-1, BLOCK["nf4"]))
    absmax = blocks.abs().amax(2)
    ratio = (blocks * (1 / absmax.clamp(min=1e-38))[..., None]).clamp(-1, 1)
    levels = torch.tensor(NF4, device=matrix.device)
    indices = torch.bucketize(ratio, (levels[:-1] + levels[1:]) / 2, out_int32=True)
    return _packed(indices.flatten(1)), absmax


def _mxfp4_codes(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and exponents. A block's exponent is chosen so that its largest value has e2m1's largest exponent.
    Values are rounded to nearest even and saturate.
    """
    blocks = matrix.unflatten(1, (-1, BLOCK["mxfp4"]))
    largest = blocks.abs().amax(2)
    exponents = (largest.view(torch.int32) >> MANTISSA_BITS) - 2  # e2m1's largest is 1.5 · 2²
    exponents = torch.where(largest > 0, exponents.clamp(1, 254), 0).to(torch.uint8)
    ratio = blocks.abs() / _divisor(_powers_of_two(exponents))[..., None]
    levels = torch.tensor(E2M1, device=matrix.device)
    middle = (levels[:-1] + levels[1:]) / 2
    below, above = torch.bucketize(ratio, middle), torch.bucketize(ratio, middle, right=True)
    indices = torch.where(below % 2 == 0, below, above)  # they differ in the middle of two: the even one
    return _packed((indices + 8 * blocks.signbit()).flatten(1)), exponents


def int8_codes(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 data [rows, columns] of a float32 matrix, and the float32 scale of each row [rows, 1]."""
    scale = matrix.abs().amax(1, keepdim=True) / 127
    return (matrix / _divisor(scale)).round().to(torch.int8), scale


def fp8_codes(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 data [rows, columns] of a float32 matrix, and its float32 scales [rows / 128, columns / 128]."""
    (rows, columns), e4m3 = matrix.shape, torch.float8_e4m3fn
    down, across = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
    padded = torch.nn.functional.pad(matrix, (0, across * FP8_BLOCK - columns, 0, down * FP8_BLOCK - rows))
    blocks = padded.view(down, FP8_BLOCK, across, FP8_BLOCK)
    scales = blocks.abs().amax((1, 3)) / torch.finfo(e4m3).max
    codes = (blocks / _divisor(scales)[:, None, :, None]).to(e4m3)
    return codes.view(padded.shape)[:rows, :columns].contiguous(), scales


def _packed(indices: Tensor) -> Tensor:
    """Return two indices of 4 bits per byte, the first in the upper half."""
    indices = indices.to(torch.uint8)
    return (indices[:, ::2] << 4) | indices[:, 1::2]


def _divisor(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, 1.0)


def _as_bytes(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes
