"""Matmuls that compute each row independently of the other rows and of their number.

On a CPU, the library behind torch.mm uses different code for few rows: with 1,024 inputs, a row's bits in a matmul of
up to 15 rows differ from its bits in a matmul of 67 rows. Here every call has TILE rows, the last one padded with
zeros. Within a tile the position of a row does not matter (tests/ops/test_batch_invariant.py); on an AMD CPU it would
matter with fewer than 12 columns, so few columns are padded too. Lower precisions are multiplied in fp32 and rounded
once. On a GPU a Triton kernel adds along the inner dimension in one order (ops/kernels/invariant_matmul.py).

Row-parallel linears, and the second linears of experts, split the inner dimension into chunks and add their products by
a binary tree, so that tensor parallelism does not change the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import pad

from megalith.ops import kernels
from megalith.ops.batch_invariant.elementwise import sum_by_pairs
from megalith.ops.gemm import Gemm, Operand
from megalith.ops.grouped_gemm import GroupedGemm, RowGroups

if kernels.AVAILABLE:
    from megalith.ops.kernels.invariant_matmul import matmul_in_parts, tiled_matmul

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
    filled, matrix = _filled(x, TILE), _filled(weight, COLUMNS).T
    y = x.new_empty(len(filled), matrix.shape[1])
    _multiply_tiles(filled, matrix, y)
    return y[: len(x), : len(weight)]


def _by_tiles_of_parts(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Return the products of equal chunks of the inner dimension, float32 [chunks, tokens, out]."""
    pieces, matrices = (
        _filled(each, multiple).unflatten(1, (parts, -1)).transpose(0, 1).contiguous()
        for each, multiple in ((x, TILE), (weight, COLUMNS))
    )
    y = x.new_empty(parts, pieces.shape[1], matrices.shape[1])
    for piece, matrix, result in zip(pieces.unbind(), matrices.mT.unbind(), y.unbind()):
        _multiply_tiles(piece, matrix, result)
    return y[:, : len(x), : len(weight)]


def _filled(x: Tensor, multiple: int) -> Tensor:
    """Return a contiguous copy of x [rows, columns], padded with zero rows to a multiple.

    It is a copy even if no row is missing: the bits of a product depend on the alignment of its factors, and only newly
    allocated memory always has the same alignment.
    """
    return pad(x, (0, 0, 0, -len(x) % multiple)).contiguous()


def _multiply_tiles(x: Tensor, matrix: Tensor, out: Tensor) -> None:
    if len(x) == TILE:
        torch.mm(x, matrix, out=out)
        return
    for part, result in zip(x.split(TILE), out.split(TILE)):
        torch.mm(part, matrix, out=result)


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias as torch.nn.functional.linear does, without a gradient."""
    y = matmul(x, weight)
    return y if bias is None else y + bias


class BatchInvariantGemm(Gemm):
    """The matmuls of a linear layer with a batch-invariant forward."""

    def forward(self, x: Operand, weight: Operand, bias: Tensor | None = None) -> Tensor:
        return invariant_linear(x[0], weight[0], bias)


PARTS = 8  # of the inner dimension of a row-parallel linear


def local_parts(size: int, ranks: int, parts: int = PARTS) -> int:
    """Return the number of equal chunks into which a rank's shard of `size` elements is split.

    All ranks together have `parts` chunks, or fewer if the global size is not a multiple of `parts`. With more ranks
    than `parts`, each rank has one chunk.
    """
    count = gcd(size * ranks, parts)
    return count // ranks if count % ranks == 0 else 1


@torch.no_grad()
def sum_of_parts(x: Tensor, weight: Tensor, parts: int, dtype: torch.dtype) -> Tensor:
    """Compute x · weightᵀ, [tokens, out], as a sum over equal chunks of the inner dimension.

    The chunks' products are added in fp32 by a binary tree of neighbours, and rounded once.
    """
    if x.is_cuda:
        return matmul_in_parts(x, weight, dtype, parts)
    return sum_by_pairs(_by_tiles_of_parts(x.float(), weight.float(), parts)).to(dtype)


class BatchInvariantRowGemm(Gemm):
    """The matmuls of a linear whose inner dimension tensor parallelism may shard.

    A rank adds its share of the PARTS products. This is a subtree of the sum on one device;
    parallel/tensor/ordered_reduce.py adds the ranks' sums.

    Args:
        inner: this rank's inner size.
        ranks: number of tensor-parallel ranks. With several, `forward` returns fp32, because the sum is not complete.
    """

    def __init__(self, inner: int, ranks: int):
        self.parts, self.is_partial = local_parts(inner, ranks), ranks > 1

    def forward(self, x: Operand, weight: Operand, bias: Tensor | None = None) -> Tensor:
        y = sum_of_parts(x[0], weight[0], self.parts, torch.float32 if self.is_partial else x[0].dtype)
        return y if bias is None else y + bias

    def dgrad(self, grad: Operand, weight: Operand) -> Tensor:
        return super().dgrad((grad[0].to(weight[0].dtype),), weight)

    def wgrad(self, grad: Operand, x: Operand) -> Tensor:
        return super().wgrad((grad[0].to(x[0].dtype),), x)


class BatchInvariantGroupedGemm(GroupedGemm):
    """The matmuls of a layer's experts with a batch-invariant forward."""

    def forward(self, x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        if x.is_cuda:
            return tiled_matmul(x, weight, x.dtype, groups.ends)
        return _by_groups(matmul, x, weight, groups)


class BatchInvariantGroupedRowGemm(GroupedGemm):
    """The matmuls of experts whose inner dimension may be sharded by expert tensor parallelism (see
    BatchInvariantRowGemm).

    Args:
        inner: this rank's inner size.
        ranks: number of expert-tensor-parallel ranks.
        reduce: sums the ranks' partial outputs, float32 [rows, out], and returns the sum in a given dtype. None: there
            is one rank.
        kernel: as in GroupedGemm.
    """

    def __init__(
        self,
        inner: int,
        ranks: int = 1,
        reduce: Callable[[Tensor, torch.dtype], Tensor] | None = None,
        kernel: bool = True,
    ):
        super().__init__(kernel)
        self.parts, self.reduce = local_parts(inner, ranks), reduce

    def forward(self, x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        dtype = x.dtype if self.reduce is None else torch.float32
        if x.is_cuda:
            y = matmul_in_parts(x, weight, dtype, self.parts, groups.ends)
        else:
            y = _by_groups(partial(sum_of_parts, parts=self.parts, dtype=dtype), x, weight, groups)
        return y if self.reduce is None else self.reduce(y, x.dtype)


def _by_groups(
    multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, groups: RowGroups
) -> Tensor:
    """Compute each group's product, [rows, out]. Rows after the last group are zero."""
    y = torch.cat([multiply(part, matrix) for part, matrix in zip(groups.split(x), weight)])
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
