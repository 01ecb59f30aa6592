"""Tensor parallelism (Shoeybi et al. 2019) and sequence parallelism (Korthikanti et al. 2022).

Linears come in pairs, and a pair needs one collective in each pass. The first is column parallel (output rows are
sharded: each rank computes some of the heads or of the MLP's columns), the second row parallel (input columns are
sharded), so that each rank has a partial sum, which is reduced. Without SP the residual stream is replicated. With SP
it is sharded by tokens (all sequences of the micro-batch concatenated) for norms, dropout and additions; the reduction
is then a reduce-scatter, and an all-gather comes before the next pair: this sends the same bytes and needs 1/tp of the
stream's memory.

    without SP   x ──(dgrad all-reduced)─ column ── row ──all-reduce──────────────── + bias
    with SP      x ──all-gather───────── column ── row ──reduce-scatter──────────── + bias
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.comm.collectives import Axis, all_gather, all_reduce, all_reduce_gradient, reduce_scatter
from megalith.errors import ConfigError
from megalith.models.pass_context import Context, PassLayout
from megalith.ops.gemm import Gemm, has_wgrad, linear
from megalith.parallel.tensor.column_linear import ColumnLinear


class TensorParallel:
    """The collectives around a layer's matmuls, and the styles of its linears.

    Args:
        axis: the tensor-parallel axis.
        sequence_parallel: shard the residual stream by tokens.
        saves_gathered_inputs: compiled column-parallel linears may save their gathered input for the backward pass.
    """

    def __init__(self, axis: Axis, sequence_parallel: bool, saves_gathered_inputs: bool = True):
        self.axis = axis
        self.sequence_parallel = sequence_parallel
        self.saves_gathered_inputs = saves_gathered_inputs

    def pass_layout(
        self, tokens: int, *, trains: bool, has_position_ids: bool, cp_size: int | None = None
    ) -> PassLayout:
        """Shard the tokens under SP, except in generation, which processes one token at a time."""
        divides = tokens % self.axis.size == 0
        if self.sequence_parallel and not divides and torch.is_grad_enabled():
            raise ConfigError(
                f"parallel.sequence_parallel cannot shard {tokens} tokens over {self.axis.size} tensor-parallel ranks; "
                "choose a sequence length that tensor_model_parallel_size divides"
            )
        return PassLayout(sharded=self.sequence_parallel and divides)

    def gather(self, x: Tensor, context: Context) -> Tensor:
        """All-gather the residual stream under SP: [1, tokens / tp, h] -> [1, tokens, h]. Gradients are summed."""
        return all_gather(x, self.axis, 1) if context.layout.sharded else all_reduce_gradient(x, self.axis)

    def reduce(self, x: Tensor, context: Context) -> Tensor:
        """Sum partial outputs [batch, seq, h] for the residual stream, which is [1, tokens / tp, h] under SP."""
        if not context.layout.sharded:
            return all_reduce(x, self.axis)
        return reduce_scatter(x.reshape(1, -1, x.shape[-1]), self.axis, 1)

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Sum x over the ranks, for use on each rank's own heads. The backward pass sums the gradients too."""
        return all_reduce_gradient(all_reduce(x, self.axis), self.axis)

    def shard_sequence(self, x: Tensor, layout: PassLayout) -> Tensor:
        """Return this rank's slice of a per-token tensor: [batch, seq] -> under SP [1, tokens / tp]."""
        return self.to_sp_order(x, layout).chunk(self.axis.size, 1)[self.axis.rank] if layout.sharded else x

    def to_sp_order(self, x: Tensor, layout: PassLayout) -> Tensor:
        """Order a per-token tensor by rank under SP: [batch, seq, ...] -> [1, tokens, ...]."""
        if not layout.sharded:
            return x
        by_rank = x.reshape(layout.micro_batches, self.axis.size, -1, *x.shape[2:]).transpose(0, 1)
        return by_rank.reshape(1, -1, *x.shape[2:])

    def reduce_sequence(self, x: Tensor, layout: PassLayout) -> Tensor:
        """Sum results that each rank computed from its own tokens. All ranks must use the sum in the same way."""
        return all_reduce(x, self.axis) if layout.sharded else x

    def from_sp_order(self, x: Tensor, layout: PassLayout, batch: int) -> Tensor:
        """Invert `to_sp_order`: [1, tokens, ...] -> [batch, seq, ...]."""
        if not layout.sharded:
            return x
        by_sequence = x.reshape(self.axis.size, layout.micro_batches, -1, *x.shape[2:]).transpose(0, 1)
        return by_sequence.reshape(batch, -1, *x.shape[2:])

    def column(self, x: Tensor, weight: Tensor, bias: Tensor | None, gemm: Gemm, context: Context) -> Tensor:
        """Compute a column-parallel linear. Returns [batch, seq, out / tp], or under SP [1, tokens, out / tp].

        weight is [out / tp, h], bias [out / tp].
        """
        sharded, edge = context.layout.sharded, gemm.edge(weight)
        saves, trains = has_wgrad(weight), torch.is_grad_enabled()
        regather = sharded and not self.saves_gathered_inputs
        y = ColumnLinear.apply(
            x.flatten(0, -2), weight, bias, gemm, edge, saves, trains, self.axis, sharded, regather
        )
        return y[None] if sharded else y.unflatten(0, x.shape[:-1])

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None, gemm: Gemm, context: Context) -> Tensor:
        """Compute a row-parallel linear. Returns the residual stream, [batch, seq, h] or under SP [1, tokens / tp, h].

        x is [batch, seq, in / tp], weight [h, in / tp], bias [h].
        """
        x = self.reduce(linear(x, weight, None, gemm), context)
        return x if bias is None else x + bias
