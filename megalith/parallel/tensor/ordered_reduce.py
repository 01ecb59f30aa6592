"""Sums over tensor-parallel ranks in the order in which one device would add.

Such sums are the outputs of row-parallel linears and, under expert tensor parallelism, of the experts' second linear.
Ranks exchange their partial sums in fp32 and add them by a binary tree of neighbours (ops/batch_invariant/matmul.py).
Thus 1, 2, 4 and 8 ranks give the same bits. NCCL and gloo add in an order that depends on the number of ranks and the
size. The exchange sends as many bytes as an all-reduce in fp32, or with sequence parallelism a reduce-scatter in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from megalith.comm.collectives import Axis, all_gather_no_grad, all_to_all
from megalith.models.pass_context import Context
from megalith.ops.batch_invariant.elementwise import sum_by_pairs
from megalith.ops.gemm import Gemm, linear


class OrderedRow:
    """Style of a row-parallel linear that computes the same as TensorParallel.row, but sums over ranks in a fixed
    order.

    Its Gemm is a BatchInvariantRowGemm.
    """

    def __init__(self, axis: Axis):
        self.axis = axis

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, gemm: Gemm, context: Context
    ) -> Tensor:
        """Return the residual stream, [batch, seq, h] or under SP [1, tokens / tp, h].

        x is [batch, seq, in / tp], weight [h, in / tp], bias [h].
        """
        y = _OrderedSum.apply(linear(x, weight, None, gemm), self.axis, context.layout.sharded, x.dtype)
        return y if bias is None else y + bias


class _OrderedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis, sharded: bool, dtype: torch.dtype) -> Tensor:
        ctx.axis, ctx.sharded, ctx.shape = axis, sharded, x.shape
        flat = x.flatten()
        flat = pad(flat, (0, -len(flat) % axis.size))
        chunk = sum_by_pairs(all_to_all(flat, axis).view(axis.size, -1)).to(dtype)
        if sharded:  # this rank's tokens
            return chunk.view(1, -1, x.shape[-1])
        return all_gather_no_grad(chunk, axis)[: x.numel()].view(x.shape)

    @staticmethod
    def backward(ctx, grad: Tensor):
        if ctx.sharded:
            grad = all_gather_no_grad(grad[0], ctx.axis).view(ctx.shape)
        return grad, None, None, None


@torch.no_grad()
def sum_over_neighbours(axis: Axis, count: int, x: Tensor) -> Tensor:
    """Return the sum of x over this rank's group of `count` consecutive ranks, without a gradient."""
    first = axis.rank // count * count
    return sum_by_pairs(all_gather_no_grad(x[None].contiguous(), axis)[first : first + count])


def ordered_columns(y: Tensor, dtype: torch.dtype, axis: Axis) -> Tensor:
    """Return this rank's columns of the sum over ranks, and zeros in the other columns: [rows, h] in `dtype`.

    The ranks can then add their results in any order. No gradient is recorded here: the gradient of the sum is the
    gradient of each rank's partial sums.

    Args:
        y: float32 [rows, h], partial sums of the same rows on all ranks.
        dtype: dtype of the result.
        axis: the ranks; their number divides h.
    """
    total = y.new_zeros(y.shape, dtype=dtype)
    if len(y):
        parts = all_to_all(y.unflatten(1, (axis.size, -1)).transpose(0, 1), axis)  # [ranks, rows, h / ranks]
        total.unflatten(1, (axis.size, -1))[:, axis.rank] = sum_by_pairs(parts).to(dtype)
    return total
