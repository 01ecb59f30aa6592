"""The dispatch buffer of expert parallelism. A dispatch row contains one token and its expert assignment.

    dispatch row    | x [hidden] | router weights, float32 [topk] | expert row ids, int32 [topk] |

The buffer is one tensor of x's dtype. Its last columns hold the bits of other dtypes, so no arithmetic may touch them.
The ranks exchange their number of (token, expert) pairs per expert. From that, a sender numbers the rows of the experts
of all ranks: by expert, then by rank, then in the order of the tokens. The receiver picks the ids that are rows on this
rank, and needs neither a sort nor a count. The gradient of a dispatch row is a dispatch row with zeros for the ids.

Static dispatch (buffers sized for any routing) sends each token to every rank, without row ids: a rank knows the
experts of all ranks' tokens, and computes the row ids itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megalith.comm.collectives import Axis, all_gather_no_grad
from megalith.models.moe import ExpertRows
from megalith.ops import kernels
from megalith.ops.compiled import as_one_kernel
from megalith.ops.permute import (
    Permutation,
    count_destinations,
    group_starts,
    inverse,
    replicate_tokens,
    rows_at,
    sum_at,
)

DROPPED = 2**31 - 1  # row id of a dropped pair, larger than any row
# Dispatch rows without row ids are padded to this many float32: 16 bytes, the widest load of a GPU.
ROW_ALIGNMENT = 4


class DispatchPlan(NamedTuple):
    """Positions of all dispatch rows. The host does not know their number yet."""

    weights: Tensor  # float32 [tokens, topk]
    choices: Tensor  # int32 [tokens, 2 · topk]: the bits of the weights, and the row ids
    token: Tensor  # int64 [dispatch rows or more]: the token of each
    row: Tensor  # int64 [tokens, ranks]: the dispatch row of each token for each rank
    first: Tensor  # int64 [1]: id of the first local expert row
    counts: Tensor  # int64 [local experts]: rows of each
    sizes: Tensor  # int64 [2 · ranks + local experts]: dispatch rows to each rank, from each rank; counts


def plan_dispatch(weights: Tensor, destinations: Tensor, axis: Axis, local_experts: int) -> DispatchPlan:
    """Plan the dispatch of this rank's tokens. Collective over `axis`.

    Args:
        weights: router weights, float32 [tokens, topk].
        destinations: expert ids, int64 [tokens, topk]; the id after the last expert drops the pair.
        axis: the expert-parallel axis.
        local_experts: number of experts per rank.
    """
    ranks, experts = axis.size, local_experts * axis.size
    # Count experts and ranks together: ids of experts, then of ranks, each followed by one id for dropped pairs.
    groups = torch.cat([destinations, destinations // local_experts + experts + 1], 1)
    sizes, before, has = count_destinations(groups, experts + ranks + 2)
    to = slice(experts + 1, -1)
    token, row = replicate_tokens(sizes[to], before[:, to], has[:, to])
    table = all_gather_no_grad(torch.cat([sizes[to], sizes[:experts]]), axis).view(ranks, -1)
    to_ranks, to_experts = table[:, :ranks], table[:, ranks:]  # by sending rank
    totals = to_experts.sum(0)
    begin = group_starts(totals)
    mine = begin + to_experts[: axis.rank].sum(0)
    row_ids = torch.cat([mine, totals.sum()[None]])[destinations] + before.gather(1, destinations)
    choices = torch.cat([weights.detach().view(torch.int32), row_ids.int()], 1)
    local = slice(axis.rank * local_experts, axis.rank * local_experts + local_experts)
    counts = totals[local]
    host_sizes = torch.cat([to_ranks[axis.rank], to_ranks[:, axis.rank], counts])
    return DispatchPlan(weights, choices, token, row, begin[local][:1].clone(), counts.clone(), host_sizes)


def pack(x: Tensor, plan: DispatchPlan, count: int, fused: bool) -> tuple[Tensor, Permutation]:
    """Return the `count` dispatch rows that this rank sends for x [tokens, hidden], and their order."""
    order = Permutation(plan.token[:count], plan.row, all_kept=False)
    return _Pack.apply(x, plan.weights, plan.choices, order, fused), order


def unpack(packed: Tensor, plan: DispatchPlan, count: int, fused: bool) -> tuple[Tensor, Tensor, Permutation]:
    """Extract the rows of this rank's experts from received dispatch rows.

    Returns:
        The `count` rows [rows, hidden], their weights, float32 [rows, 1], and their order.
    """
    topk = plan.weights.shape[1]
    rows, weights, token, row = _Unpack.apply(packed, plan.first, topk, count, fused)
    return rows, weights, Permutation(token, row, all_kept=False)


def replicate_rows(x: Tensor, weights: Tensor, ranks: int, fused: bool) -> Tensor:
    """Return dispatch rows without row ids, repeated for each rank: [ranks · tokens, hidden + columns that hold the
    weights].

    x is [tokens, hidden], weights are float32 [tokens, topk].
    """
    return _ReplicateRows.apply(x, weights, ranks, fused)


def unpack_replicated(
    packed: Tensor, plan: ExpertRows, end: Tensor, hidden: int, fused: bool
) -> tuple[Tensor, Tensor, Permutation]:
    """Unpack rows that were sent by `replicate_rows`, into a buffer sized for any routing.

    Returns the same as `unpack`. Rows at or after position `end`, int32 [1], are undefined.
    """
    rows, weights = _UnpackReplicated.apply(packed, plan.pair, plan.row, end, hidden, fused)
    order = Permutation(plan.pair // plan.row.shape[1], plan.row, all_kept=False, all_hold=False, end=end)
    return rows, weights, order


class _ReplicateRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weights: Tensor, ranks: int, fused: bool) -> Tensor:
        ctx.hidden, ctx.topk, ctx.ranks, ctx.fused = x.shape[1], weights.shape[1], ranks, fused
        bits = F.pad(weights.detach(), (0, -ctx.topk % ROW_ALIGNMENT)).view(x.dtype)
        return torch.cat([x, bits], 1).repeat(ranks, 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        weights = grad[:, ctx.hidden :].view(torch.float32)[:, : ctx.topk]
        args = grad[:, : ctx.hidden], weights, ctx.ranks
        sums = as_one_kernel(_sum_over_ranks, *args, sizes_vary=True) if ctx.fused else _sum_over_ranks(*args)
        return *sums, None, None


class _UnpackReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packed: Tensor, pair: Tensor, row: Tensor, end: Tensor, hidden: int, fused: bool):
        x, weights, topk = packed[:, :hidden], packed[:, hidden:].view(torch.float32), row.shape[1]
        ctx.row, ctx.width, ctx.fused = row, weights.shape[1], fused
        weights = weights[:, :topk]
        if fused and kernels.AVAILABLE and x.is_cuda:
            row_weights = as_one_kernel(rows_at, weights.reshape(-1, 1), pair, False, sizes_vary=True)
            return kernels.take_rows(x, pair, end, topk), row_weights
        args = x, weights, pair
        return as_one_kernel(_take_pairs, *args, sizes_vary=True) if fused else _take_pairs(*args)

    @staticmethod
    def backward(ctx, grad: Tensor, grad_weights: Tensor):
        args = grad, grad_weights, ctx.row, ctx.width
        x, weights = (
            as_one_kernel(_place_row_gradients, *args, sizes_vary=True)
            if ctx.fused
            else _place_row_gradients(*args)
        )
        return torch.cat([x, weights.view(x.dtype)], 1), None, None, None, None, None


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weights: Tensor, choices: Tensor, order: Permutation, fused: bool) -> Tensor:
        ctx.hidden, ctx.topk, ctx.row, ctx.fused = x.shape[1], weights.shape[1], order.row, fused
        return torch.cat([x, choices.view(x.dtype)], 1).index_select(0, order.token)

    @staticmethod
    def backward(ctx, grad: Tensor):
        weights = grad[:, ctx.hidden :].view(torch.float32)[:, : ctx.topk]
        args = grad[:, : ctx.hidden], weights, ctx.row
        sums = (
            as_one_kernel(_sum_row_gradients, *args, rows_vary=True)
            if ctx.fused
            else _sum_row_gradients(*args)
        )
        return *sums, None, None, None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packed: Tensor, first: Tensor, topk: int, count: int, fused: bool):
        bits = packed.view(torch.int32)
        weights, row_ids = bits[:, -2 * topk : -topk].view(torch.float32), bits[:, -topk:]
        x = packed.narrow(1, 0, packed.shape[1] - 2 * topk * 4 // packed.element_size())
        args = x, weights, row_ids, first, packed.new_empty(count, dtype=torch.bool)
        outputs = as_one_kernel(_unpack_rows, *args, rows_vary=True) if fused else _unpack_rows(*args)
        rows, row_weights, token, ctx.row = outputs
        ctx.fused = fused
        ctx.mark_non_differentiable(token, ctx.row)
        return rows, row_weights, token, ctx.row

    @staticmethod
    def backward(ctx, grad: Tensor, grad_weights: Tensor, *_):
        args = grad, grad_weights, ctx.row, 2 * ctx.row.shape[1]
        x, weights = (
            as_one_kernel(_place_row_gradients, *args, rows_vary=True)
            if ctx.fused
            else _place_row_gradients(*args)
        )
        return torch.cat([x, weights.view(x.dtype)], 1), None, None, None, None


def _sum_row_gradients(x: Tensor, weights: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the gradients of each token's dispatch rows."""
    return sum_at(x, row, False), sum_at(weights, row, False)


def _unpack_rows(
    x: Tensor, weights: Tensor, row_ids: Tensor, first: Tensor, rows: Tensor
) -> tuple[Tensor, ...]:
    """Return the (token, expert) rows `rows`: their values, their weights, the dispatch row of each, and the rows of
    each dispatch row.
    """
    topk, count = row_ids.shape[1], len(rows)
    row = row_ids - first
    row = torch.where(row < 0, DROPPED, row).clamp(max=count)
    pair = inverse(row.flatten(), count + 1)[:-1]
    token = pair // topk
    return x[token], weights.reshape(-1, 1)[pair], token, row


def _place_row_gradients(
    grad: Tensor, grad_weights: Tensor, row: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, and of the weights padded with zeros: float32 [dispatch rows, width]."""
    weights = rows_at(grad_weights, row.flatten(), False).view(row.shape)
    return sum_at(grad, row, False), F.pad(weights, (0, width - row.shape[1]))


def _take_pairs(x: Tensor, weights: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
    """Gather the token rows and the weights of (token, weight) pairs."""
    return rows_at(x, pair // weights.shape[1], False), rows_at(weights.reshape(-1, 1), pair, False)


def _sum_over_ranks(x: Tensor, weights: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Sum `ranks` consecutive blocks of rows, in at least fp32, and round the result once."""
    return tuple(part.unflatten(0, (ranks, -1)).sum(0) for part in (x, weights))
