"""Matmuls in which a row's result does not depend on the other rows or on their number.

On a CPU, the library behind torch.mm takes other code for few rows: with 1,024 inputs, up to 15 rows give other bits
than 67 do. Here every call has TILE rows, the last one padded with zeros. Within a tile the position of a row does not
matter (tests/ops/test_batch_invariant.py); on an AMD CPU it would with fewer than 12 columns, so those are padded too.
Lower precisions are multiplied in fp32 and rounded once. On a GPU a Triton kernel has tiles of a fixed size and adds
along the inner dimension in one order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from megalith.ops import kernels
from megalith.ops.gemm import Gemm, Operand
from megalith.ops.grouped_gemm import GroupedGemm, RowGroups

if kernels.AVAILABLE:
    from megalith.ops.kernels.batch_invariant_kernels import tiled_matmul

TILE, COLUMNS = 32, 16  # rows per matmul on a CPU; columns are padded to a multiple


@torch.no_grad()
def matmul(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return x · weightᵀ, [..., out], for x [..., in] and weight [out, in] of one dtype.

    The result has that dtype, or `dtype`. It has no gradient.
    """
    dtype, rows = dtype or x.dtype, x.flatten(0, -2)
    y = tiled_matmul(rows, weight, dtype) if x.is_cuda else _by_tiles(rows.float(), weight.float()).to(dtype)
    return y.reshape(*x.shape[:-1], len(weight))


def _by_tiles(x: Tensor, weight: Tensor) -> Tensor:
    rows, columns = len(x), len(weight)
    matrix = pad(weight, (0, 0, 0, -columns % COLUMNS)).contiguous().T
    padded = pad(x, (0, 0, 0, -rows % TILE)).contiguous()
    y = padded.new_empty(len(padded), matrix.shape[1])
    for part, result in zip(padded.split(TILE), y.split(TILE)):
        torch.mm(part, matrix, out=result)
    return y[:rows, :columns]


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias as torch.nn.functional.linear does, without a gradient."""
    y = matmul(x, weight)
    return y if bias is None else y + bias


class BatchInvariantGemm(Gemm):
    """The matmuls of a linear layer with a batch-invariant forward."""

    def forward(self, x: Operand, weight: Operand, bias: Tensor | None = None) -> Tensor:
        return invariant_linear(x[0], weight[0], bias)


class BatchInvariantGroupedGemm(GroupedGemm):
    """The matmuls of a layer's experts with a batch-invariant forward."""

    def forward(self, x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        if x.is_cuda:
            return tiled_matmul(x, weight, x.dtype, groups.ends)
        parts = [matmul(part, matrix) for part, matrix in zip(groups.split(x), weight)]
        y = torch.cat(parts)
        return pad(y, (0, 0, 0, len(x) - len(y)))


def float32_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Return x · weightᵀ, float32 [tokens, out], as ops.gemm.float32_matmul does, for routers."""
    return _Float32Matmul.apply(x, weight)


class _Float32Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return matmul(x, weight, torch.float32)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        return (grad @ weight.float()).to(x.dtype), (grad.T @ x.float()).to(weight.dtype)
