"""Column-parallel linear with collectives that overlap its backward matmuls."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megalith.comm.collectives import Axis, begin_all_gather, begin_all_reduce, begin_reduce_scatter, wait
from megalith.ops.compiled import depend_on
from megalith.ops.gemm import DeferredWgrad, Gemm, Operand


class ColumnLinear(torch.autograd.Function):
    """Autograd function for x · weightᵀ + bias of all tokens.

    With SP, the input is all-gathered. Only this rank's tokens are saved for the backward pass, which gathers them
    again. torch.compile would merge the two gathers and save the result, unless the second one depends on the gradient
    (`regather`).

    In the backward pass, the gather overlaps dgrad, and the reduction of dgrad overlaps wgrad. If wgrad is deferred, so
    is the gather.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gemm: Gemm,
        edge,
        saves: bool,
        trains: bool,
        axis: Axis,
        sharded: bool,
        regather: bool,
    ) -> Tensor:  # x [tokens, or with SP tokens / tp, h] -> [tokens, out / tp]
        operand, saved = gemm.inputs(x, saves, sharded)
        weight, saved_weight = gemm.weights(weight, trains)
        ctx.save_for_backward(*saved_weight, *saved)
        ctx.gemm, ctx.edge, ctx.axis, ctx.sharded = gemm, edge, axis, sharded
        ctx.weight_tensors = len(saved_weight)
        ctx.regather = regather
        if sharded:
            operand = end_gather(begin_gather(operand, axis), operand)
        return gemm.forward(operand, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):
        saved = ctx.saved_tensors  # read once, because a recomputed layer returns them only once
        weight, x = saved[: ctx.weight_tensors], saved[ctx.weight_tensors :]
        gemm, axis, grad_weight = ctx.gemm, ctx.axis, None
        grad_output = grad
        grad_by_row, grad = gemm.gradients(grad, ctx.needs_input_grad[1])
        gathers = ctx.sharded and ctx.needs_input_grad[1] and ctx.edge is None
        if ctx.regather and torch.compiler.is_compiling():
            x = [depend_on(each, grad_output) if each.dim() else each for each in x]
        gathering = begin_gather(x, axis) if gathers else None
        begin = begin_reduce_scatter if ctx.sharded else begin_all_reduce
        reducing = begin(gemm.dgrad(grad_by_row, weight), axis)
        if gathering is not None:
            x = end_gather(gathering, x)
        if ctx.edge is not None:
            gemm.deferred.append(DeferredWgrad(partial(_wgrad, gemm, grad, x, axis, ctx.sharded), ctx.edge))
        elif ctx.needs_input_grad[1]:
            grad_weight = gemm.wgrad(grad, x)
        return wait(reducing), grad_weight, None, None, None, None, None, None, None, None


def _wgrad(gemm: Gemm, grad: Operand, x: Operand, axis: Axis, sharded: bool) -> Tensor:
    return gemm.wgrad(grad, end_gather(begin_gather(x, axis), x) if sharded else x)


def begin_gather(operand: Operand, axis: Axis) -> list[Tensor]:
    """Start the all-gather of an operand; `end_gather` returns the result.

    FP8 values are sent as bytes because gloo does not support FP8.
    """
    return [begin_all_gather(_as_bytes(each), axis) if each.dim() else each for each in operand]


def end_gather(gathering: list[Tensor], operand: Operand) -> list[Tensor]:
    """Return the operand, gathered over the tokens of all ranks."""
    return [wait(each).view(local.dtype) if local.dim() else each for each, local in zip(gathering, operand)]


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.itemsize == 1 else x
