"""The dispatch buffer of expert parallelism: one row holds a token and its routing.

    row of a parcel    | x [hidden] | weights of its experts, float32 [topk] | numbers of its rows, int32 [topk] |

The buffer is one tensor of x's dtype. Its last columns hold the bits of other dtypes, so no arithmetic may touch them.
The ranks exchange how many pairs of token and expert they have for every expert. From that, a sender numbers the rows
of the experts of all ranks: by expert, within an expert by rank, within a rank in the order of the tokens. The
receiver of a parcel picks the numbers that are rows on this rank, and needs neither a sort nor a count.

The gradient of a parcel is a parcel: x's, the weights', and zeros.

With buffers as large as any routing needs, every rank gets a parcel of each token, without row numbers: it knows the
experts of all ranks' tokens and finds the rows itself.
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

NOWHERE = 2**31 - 1  # behind all rows
# Of four bytes, of which a parcel without numbers of rows has a multiple: 16 bytes, what a GPU loads at once.
ROW_ALIGNMENT = 4


class DispatchPlan(NamedTuple):
    """Which tokens go where; every parcel's place is known, but not how many there are."""

    weights: Tensor  # float32 [tokens, topk]
    choices: Tensor  # int32 [tokens, 2 · topk]: the bits of the weights, and the numbers of the rows
    token: Tensor  # int64 [parcels or more]
    row: Tensor  # int64 [tokens, ranks]: the parcels of each token, by the rank that they go to
    first: Tensor  # int64 [1]: the number of the first row here
    counts: Tensor  # int64 [experts here]: rows of each
    sizes: Tensor  # int64 [2 · ranks + experts here]: parcels to each rank, from each rank, and counts


def plan_dispatch(weights: Tensor, destinations: Tensor, axis: Axis, here: int) -> DispatchPlan:
    """Of tokens with weights float32 and experts int64 [tokens, topk], `here` of them on each rank of the axis; the
    number behind the last expert is nowhere."""
    ranks, experts = axis.size, here * axis.size
    # Experts and ranks are numbered one after the other, each with a number for nowhere at their end.
    groups = torch.cat([destinations, destinations // here + experts + 1], 1)
    sizes, before, has = count_destinations(groups, experts + ranks + 2)
    to = slice(experts + 1, -1)
    token, row = replicate_tokens(sizes[to], before[:, to], has[:, to])
    table = all_gather_no_grad(torch.cat([sizes[to], sizes[:experts]]), axis).view(ranks, -1)
    to_ranks, to_experts = table[:, :ranks], table[:, ranks:]  # of each rank
    totals = to_experts.sum(0)
    begin = group_starts(totals)
    mine = begin + to_experts[: axis.rank].sum(0)
    number = torch.cat([mine, totals.sum()[None]])[destinations] + before.gather(1, destinations)
    choices = torch.cat([weights.detach().view(torch.int32), number.int()], 1)
    own = slice(axis.rank * here, axis.rank * here + here)
    counts = totals[own]
    told = torch.cat([to_ranks[axis.rank], to_ranks[:, axis.rank], counts])
    return DispatchPlan(weights, choices, token, row, begin[own][:1].clone(), counts.clone(), told)


def pack(x: Tensor, plan: DispatchPlan, count: int, fused: bool) -> tuple[Tensor, Permutation]:
    """The `count` parcels of the tokens x [tokens, hidden], and the order that they are in."""
    order = Permutation(plan.token[:count], plan.row, all_kept=False)
    return _Pack.apply(x, plan.weights, plan.choices, order, fused), order


def unpack(packed: Tensor, plan: DispatchPlan, count: int, fused: bool) -> tuple[Tensor, Tensor, Permutation]:
    """Of the parcels that have come the `count` rows of the experts here, [rows, hidden], and their weights, float32
    [rows, 1]; and the order of these rows."""
    topk = plan.weights.shape[1]
    rows, weights, token, row = _Unpack.apply(packed, plan.first, topk, count, fused)
    return rows, weights, Permutation(token, row, all_kept=False)


def spread(x: Tensor, weights: Tensor, ranks: int, fused: bool) -> Tensor:
    """The parcels of the tokens x [tokens, hidden] with weights float32 [tokens, topk], the same for each of the
    ranks: [ranks · tokens, hidden and the weights' bits]."""
    return _Spread.apply(x, weights, ranks, fused)


def unpack_replicated(
    parcels: Tensor, plan: ExpertRows, end: Tensor, hidden: int, fused: bool
) -> tuple[Tensor, Tensor, Permutation]:
    """As unpack, of parcels that have come from spread, with as many rows as there may be; from `end` on, int32 [1],
    they may hold anything."""
    rows, weights = _GatheredRows.apply(parcels, plan.pair, plan.row, end, hidden, fused)
    order = Permutation(plan.pair // plan.row.shape[1], plan.row, all_kept=False, all_hold=False, end=end)
    return rows, weights, order


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weights: Tensor, ranks: int, fused: bool) -> Tensor:
        ctx.hidden, ctx.topk, ctx.ranks, ctx.fused = x.shape[1], weights.shape[1], ranks, fused
        bits = F.pad(weights.detach(), (0, -ctx.topk % ROW_ALIGNMENT)).view(x.dtype)
        return torch.cat([x, bits], 1).repeat(ranks, 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        weights = grad[:, ctx.hidden :].view(torch.float32)[:, : ctx.topk]
        args = grad[:, : ctx.hidden], weights, ctx.ranks
        sums = (
            as_one_kernel(_sums_over_ranks, *args, sizes_vary=True) if ctx.fused else _sums_over_ranks(*args)
        )
        return *sums, None, None


class _GatheredRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parcels: Tensor, pair: Tensor, row: Tensor, end: Tensor, hidden: int, fused: bool):
        x, weights, topk = parcels[:, :hidden], parcels[:, hidden:].view(torch.float32), row.shape[1]
        ctx.row, ctx.width, ctx.fused = row, weights.shape[1], fused
        weights = weights[:, :topk]
        if fused and kernels.AVAILABLE and x.is_cuda:
            taken = as_one_kernel(rows_at, weights.reshape(-1, 1), pair, False, sizes_vary=True)
            return kernels.take_rows(x, pair, end, topk), taken
        args = x, weights, pair
        return as_one_kernel(_rows_of_pairs, *args, sizes_vary=True) if fused else _rows_of_pairs(*args)

    @staticmethod
    def backward(ctx, grad: Tensor, grad_weights: Tensor):
        args = grad, grad_weights, ctx.row, ctx.width
        x, weights = as_one_kernel(_both_taken, *args, sizes_vary=True) if ctx.fused else _both_taken(*args)
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
        sums = as_one_kernel(_both_sums, *args, rows_vary=True) if ctx.fused else _both_sums(*args)
        return *sums, None, None, None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packed: Tensor, first: Tensor, topk: int, count: int, fused: bool):
        bits = packed.view(torch.int32)
        weights, numbers = bits[:, -2 * topk : -topk].view(torch.float32), bits[:, -topk:]
        x = packed.narrow(1, 0, packed.shape[1] - 2 * topk * 4 // packed.element_size())
        args = x, weights, numbers, first, packed.new_empty(count, dtype=torch.bool)
        found = as_one_kernel(_unpacked, *args, rows_vary=True) if fused else _unpacked(*args)
        rows, row_weights, token, ctx.row = found
        ctx.fused = fused
        ctx.mark_non_differentiable(token, ctx.row)
        return rows, row_weights, token, ctx.row

    @staticmethod
    def backward(ctx, grad: Tensor, grad_weights: Tensor, *nothing):
        args = grad, grad_weights, ctx.row, 2 * ctx.row.shape[1]
        x, weights = as_one_kernel(_both_taken, *args, rows_vary=True) if ctx.fused else _both_taken(*args)
        return torch.cat([x, weights.view(x.dtype)], 1), None, None, None, None


def _both_sums(x: Tensor, weights: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of a token's parcels, added."""
    return sum_at(x, row, False), sum_at(weights, row, False)


def _unpacked(x: Tensor, weights: Tensor, numbers: Tensor, first: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    """The rows, as many as `rows` has, and their weights; the parcel of each row, and the rows of each parcel."""
    topk, count = numbers.shape[1], len(rows)
    row = numbers - first
    row = torch.where(row < 0, NOWHERE, row).clamp(max=count)
    pair = inverse(row.flatten(), count + 1)[:-1]
    token = pair // topk
    return x[token], weights.reshape(-1, 1)[pair], token, row


def _both_taken(grad: Tensor, grad_weights: Tensor, row: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The gradients of the parcels' x, and those of their weights beside zeros: float32 [parcels, width]."""
    weights = rows_at(grad_weights, row.flatten(), False).view(row.shape)
    return sum_at(grad, row, False), F.pad(weights, (0, width - row.shape[1]))


def _rows_of_pairs(x: Tensor, weights: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of pairs of a token and one of its weights, and those weights."""
    return rows_at(x, pair // weights.shape[1], False), rows_at(weights.reshape(-1, 1), pair, False)


def _sums_over_ranks(x: Tensor, weights: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """The sums of the ranks' parts, which stand one after the other, in fp32 at least, rounded once."""
    return tuple(part.unflatten(0, (ranks, -1)).sum(0) for part in (x, weights))
