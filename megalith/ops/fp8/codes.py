"""FP8 arithmetic: scales, casts per tensor, row or block, and matmuls. recipes.py decides which tensors are cast, and
how.

CPUs have no useful FP8 matmul. There, FP8 data is multiplied in fp64. Sums of products of two e4m3 numbers are exact in
fp64 in any order up to 2¹⁷ terms, so this is the reference for GPUs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from megalith.compat.torch_operators import keep_version_counter, scaled_mm
from megalith.ops import kernels
from megalith.ops.gemm import Operand

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
FORMATS = {
    "hybrid": (E4M3, E4M3, E5M2),
    "e4m3": (E4M3, E4M3, E4M3),
}  # dtypes of inputs, weights and gradients
INPUT, WEIGHT, GRADIENT = 0, 1, 2
BLOCK = 128
LARGEST_SCALE = torch.finfo(torch.float32).max
EXPONENT_BITS = 0x7F800000  # of a float32


def scale_from_amax(amax: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """Return the dtype's largest number / amax / 2^margin in fp32, rounded once; 1 for an amax of 0.

    NaN for an amax that is not finite.
    """
    scale = (LARGEST[dtype] / amax.double() / 2**margin).clamp(max=LARGEST_SCALE).float()
    return torch.where(amax == 0, 1.0, torch.where(amax.isfinite(), scale, torch.nan))


def power_of_two(scale: Tensor) -> Tensor:
    """Round a positive, normal fp32 scale down to a power of two. NaN stays NaN."""
    power = (scale.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    return torch.where(scale.isfinite(), power, scale)


def reciprocal(scale: Tensor) -> Tensor:
    return (1 / scale.double()).float()


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return round(x · scale) in an FP8 dtype, clamped first because torch's casts disagree about overflow."""
    largest = LARGEST[dtype]
    return (x.float() * scale).clamp(-largest, largest).to(dtype)


def scaled_matmul(
    a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None = None, fast: bool = False
) -> Tensor:
    """Return a · bᵀ + bias, [m, n], for FP8 data a [m, k] and b [n, k] with their inverse scales, contiguous along k.

    Computed in fp64 on a CPU. `fast`: Hopper's tensor cores keep the whole sum in their accumulator of about 14 bits,
    instead of adding it to an fp32 sum after every 128 terms.
    """
    (left, left_inverse), (right, right_inverse) = a, b
    if left.is_cuda:
        inside = bias if dtype != torch.float32 else None
        y = scaled_mm(
            left, right.t(), left_inverse, right_inverse, bias=inside, out_dtype=dtype, use_fast_accum=fast
        )
        bias = None if inside is not None else bias
    else:
        y = (left.double() @ right.double().T * (left_inverse.double() * right_inverse.double())).to(dtype)
    return y if bias is None else y + bias


def transposed(operand: Operand) -> Operand:
    """Transpose FP8 data [m, n] to contiguous [n, m]. Makes no copy if the data was written by column."""
    codes, *inverse = operand
    return codes.t() if codes.t().is_contiguous() else transpose(codes), *inverse


@torch.library.custom_op("megalith::fp8_cast", mutates_args=())
def cast(
    x: Tensor, scale: Tensor, running_amax: Tensor | None, dtype: torch.dtype, by_row: bool, by_column: bool
) -> tuple[Tensor, Tensor]:
    """Return quantize(x, scale) [m, n] and its contiguous transpose [n, m], each empty unless requested.

    `by_row` requests the first, `by_column` the second. The maximum of |x| is merged into `running_amax`, a float32
    scalar.

    autograd does not track the change of `running_amax`. The change does not affect results, and recomputation merges
    the same maximum again, which changes nothing.
    """
    if running_amax is not None:
        with keep_version_counter(running_amax):
            running_amax.copy_(torch.maximum(running_amax, x.abs().amax().float()))
    codes, none = quantize(x, scale, dtype).contiguous(), x.new_empty(0, dtype=dtype)
    return (codes if by_row else none), (_turned(codes) if by_column else none.clone())


def _turned(x: Tensor) -> Tensor:
    """Return the transpose [n, m] of x [m, n] in new memory, because an operator must not return a view, even if m or
    n is 1."""
    return x.t().clone(memory_format=torch.contiguous_format)


@cast.register_fake
def _(x: Tensor, scale: Tensor, running_amax, dtype, by_row: bool, by_column: bool) -> tuple[Tensor, Tensor]:
    shapes = x.shape if by_row else (0,), x.shape[::-1] if by_column else (0,)
    return tuple(x.new_empty(shape, dtype=dtype) for shape in shapes)


@torch.library.custom_op("megalith::fp8_amax", mutates_args=())
def amax(x: Tensor) -> Tensor:
    """Return the maximum of |x|, a float32 scalar."""
    return x.abs().amax().float()


@amax.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


@torch.library.custom_op("megalith::fp8_transpose", mutates_args=())
def transpose(codes: Tensor) -> Tensor:
    """Transpose FP8 data [m, n] to contiguous [n, m]."""
    return _turned(codes)


@transpose.register_fake
def _(codes: Tensor) -> Tensor:
    return codes.new_empty(codes.shape[::-1])


@torch.library.custom_op("megalith::fp8_cast_blocks", mutates_args=())
def cast_blocks(
    x: Tensor, by_row: bool, by_column: bool, tiles: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return e4m3 data of x [m, n] and of its transpose [n, m], each with inverse scales, each empty unless requested.

    Blocks are 1 × 128 and 128 × 1, with inverse scales [n / 128, m] and [m / 128, n]; with `tiles`, 128 × 128, with one
    [m / 128, n / 128] for both.
    """
    none = x.new_empty(0, dtype=E4M3), x.new_empty(0, dtype=torch.float32)
    if tiles:
        codes, inverse = _block_codes(x.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)), (1, 3))
        codes = codes.flatten(2).flatten(0, 1)
        return codes, inverse, _turned(codes) if by_column else none[0], none[1]
    results = []
    for requested, dim in ((by_row, 1), (by_column, 0)):
        codes, inverse = _block_codes(x.unflatten(dim, (-1, BLOCK)), (dim + 1,)) if requested else none
        if requested:
            codes = codes.flatten(dim, dim + 1)
            codes, inverse = (codes, inverse.t()) if dim == 1 else (codes.t(), inverse)
        results += [codes.contiguous(), inverse.contiguous()]
    return tuple(each.clone() if not each.numel() else each for each in results)


@cast_blocks.register_fake
def _(x: Tensor, by_row: bool, by_column: bool, tiles: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (m, n), none = x.shape, (0,)
    codes = [
        x.new_empty(shape, dtype=E4M3)
        for shape in ((m, n) if by_row else none, (n, m) if by_column else none)
    ]
    if tiles:
        shapes = (m // BLOCK, n // BLOCK), none
    else:
        shapes = (n // BLOCK, m) if by_row else none, (m // BLOCK, n) if by_column else none
    inverses = [x.new_empty(shape, dtype=torch.float32) for shape in shapes]
    return codes[0], inverses[0], codes[1], inverses[1]


@torch.library.custom_op("megalith::fp8_block_matmul", mutates_args=())
def block_matmul(
    a: Tensor, a_inverse: Tensor, b: Tensor, b_inverse: Tensor, tiles: bool, dtype: torch.dtype
) -> Tensor:
    """Return a · bᵀ, [m, n], of e4m3 data a [m, k] and b [n, k], contiguous along k.

    Inverse scales are [m, k / 128] for a, and [n, k / 128] for b. With `tiles`, the scales of b are [n / 128, k / 128].
    """
    over = b_inverse.double().repeat_interleave(BLOCK, 0) if tiles else b_inverse.double()
    a, b = (
        codes.double().unflatten(1, (-1, BLOCK)) * inverse.double()[..., None]
        for codes, inverse in ((a, a_inverse), (b, over))
    )
    return (a.flatten(1) @ b.flatten(1).T).to(dtype)


@block_matmul.register_fake
def _(a: Tensor, a_inverse: Tensor, b: Tensor, b_inverse: Tensor, tiles: bool, dtype: torch.dtype) -> Tensor:
    return a.new_empty(len(a), len(b), dtype=dtype)


@block_matmul.register_kernel("cuda")
def block_matmul_on_gpu(
    a: Tensor, a_inverse: Tensor, b: Tensor, b_inverse: Tensor, tiles: bool, dtype: torch.dtype
) -> Tensor:
    """Compute `block_matmul` with cuBLAS, which requires its own layout of scales."""
    blocks, rows = F.ScalingType, len(a)
    if tiles:  # cuBLAS needs a multiple of 4 blocks along k in memory
        b_inverse = F.pad(b_inverse, (0, -b_inverse.shape[1] % 4)).contiguous().t()
        kind = blocks.BlockWise128x128
    else:
        b_inverse, kind = _first_fastest(b_inverse), blocks.BlockWise1x128
    if rows % BLOCK:  # only in generation
        more = (0, 0, 0, -rows % BLOCK)
        a, a_inverse = F.pad(a.view(torch.uint8), more).view(a.dtype), F.pad(a_inverse, more)
    a_inverse = _first_fastest(a_inverse)
    y = F.scaled_mm(a, b.t(), a_inverse, blocks.BlockWise1x128, b_inverse, kind, output_dtype=dtype)
    return y[:rows]


def _block_codes(blocks: Tensor, dims: tuple[int, ...]) -> Operand:
    """Return the FP8 values of blocks along `dims`, and their inverse scales."""
    scale = scale_from_amax(blocks.abs().amax(dims, keepdim=True).float(), E4M3)
    scale = power_of_two(scale)
    return quantize(blocks, scale, E4M3), reciprocal(scale).squeeze(dims)


def _first_fastest(x: Tensor) -> Tensor:
    """Return the matrix x [m, n] in a layout with dimension 0 contiguous in memory."""
    return x.t().contiguous().t()


if kernels.AVAILABLE:
    cast.register_kernel("cuda")(kernels.fp8_kernels.cast)
    amax.register_kernel("cuda")(kernels.fp8_kernels.amax)
    transpose.register_kernel("cuda")(kernels.fp8_kernels.transpose)
    cast_blocks.register_kernel("cuda")(kernels.fp8_kernels.cast_blocks)
