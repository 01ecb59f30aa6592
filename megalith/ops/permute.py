"""Tokens brought into the order of their experts, and back.

A token goes to topk experts, so there are tokens · topk pairs of a token and an expert. Each becomes a row of the
experts' input. `take_rows` makes the rows, `sum_rows` gives each token the sum of its rows; each is the gradient of
the other, so that neither direction adds into memory and the result does not depend on an order of additions.

With a capacity some pairs have no row, for they were dropped, and some rows no pair, for they fill an expert up. Both
read zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.ops.compiled import as_one_kernel


@dataclass(frozen=True)
class Order:
    """Which pair each row holds, and where the row of each pair is."""

    pair: Tensor  # int64 [rows]: token · topk + choice; the number of pairs for a row that fills up
    row: Tensor  # int64 [tokens, topk]; the number of rows for a pair without one
    all_kept: bool = True  # every pair has a row
    all_hold: bool = True  # every row holds a pair

    @property
    def token(self) -> Tensor:
        """The token of each row: int64 [rows], the number of tokens for a row that fills up."""
        topk = self.row.shape[1]
        return self.pair if topk == 1 else self.pair // topk

    def by_pair(self) -> Order:
        """The same rows, of pairs instead of tokens: for what each pair has one of."""
        return Order(self.pair, self.row.reshape(-1, 1), self.all_kept, self.all_hold)

    def inverse(self) -> Order:
        """Of rows that are only reordered, back: rows of this order become those it was made of."""
        return Order(self.row.flatten(), self.pair[:, None])


def transposed(sizes: Tensor, rows: int) -> Order:
    """Blocks of rows one behind the other, sizes int64 [m, n] of them, which stood in [m, n] and shall in [n, m].

    `rows` is how many there are of all blocks.
    """
    return Order(*as_one_kernel(_transposed, sizes, rows, sizes_vary=True))


def _transposed(sizes: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """`pair` and `row` of that Order: a row moves as far as its block."""
    across = sizes.T
    begin = (sizes.flatten().cumsum(0) - sizes.flatten()).view_as(sizes)
    end = (across.flatten().cumsum(0) - across.flatten()).view_as(across).T
    place = torch.arange(rows, device=sizes.device)
    row = place + (end - begin).flatten().repeat_interleave(sizes.flatten(), output_size=rows)
    pair = place + (begin - end).T.flatten().repeat_interleave(across.flatten(), output_size=rows)
    return pair, row[:, None]


def copies(places: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each token once for each place that it is wanted at, by place and in the tokens' order.

    `places` int64 [tokens, topk] are of `count`, the number `count` is none. Returns how many copies there are for each
    place, int64 [count], which the device alone knows, and what copies_order takes.
    """
    tokens = len(places)
    wanted = torch.zeros(count + 1, tokens, dtype=torch.int64, device=places.device)
    wanted = wanted.scatter(0, places.T, 1)[:count]
    # Place by place: one scan of them all would be a kernel whose blocks wait for each other.
    upto = wanted.cumsum(1)
    sizes = upto[:, -1]
    ends = sizes.cumsum(0)
    last = count * tokens
    row = torch.where(wanted == 1, upto + (ends - sizes)[:, None] - 1, last)  # [count, tokens]
    place = torch.arange(last, device=places.device)
    pair = torch.empty(last + 1, dtype=torch.int64, device=places.device)
    pair = pair.scatter(0, row.flatten(), place % tokens * count + place // tokens)
    return sizes, pair, row.clamp(max=ends[-1]).T.contiguous()


def copies_order(pair: Tensor, row: Tensor, count: int) -> Order:
    """The Order of `copies`, `count` of them in all, in which a pair is one of a token and a place."""
    return Order(pair[:count], row, all_kept=False)


def places_in_group(groups: Tensor, count: int) -> Tensor:
    """Where each element stands among those of its group, from 0: groups int64 [n] is sorted, below `count`."""
    sizes = counted(groups, count)
    starts = sizes.cumsum(0) - sizes
    return torch.arange(len(groups), device=groups.device) - starts[groups]


def counted(values: Tensor, count: int) -> Tensor:
    """How often each of 0 … count - 1 occurs in values int64 [n]: int64 [count], without waiting for the device."""
    return values.new_zeros(count).scatter_add(0, values, values.new_ones(()).expand_as(values))


def take_rows(x: Tensor, order: Order, fused: bool = False) -> Tensor:
    """The rows [rows, width] of the tokens x [tokens, width]. `fused`: its gradient is one compiled kernel on a GPU."""
    return _TakeRows.apply(x, order, fused)


def sum_rows(rows: Tensor, order: Order, fused: bool = False) -> Tensor:
    """The sum of each token's rows: [rows, width] → [tokens, width]. `fused`: in one compiled kernel on a GPU."""
    return _SumRows.apply(rows, order, fused)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, order: Order, fused: bool) -> Tensor:
        ctx.order, ctx.fused = order, fused
        return _taken(x, order, fused)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _sums(grad, ctx.order, ctx.fused), None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, order: Order, fused: bool) -> Tensor:
        ctx.order, ctx.fused = order, fused
        return _sums(rows, order, fused)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _taken(grad, ctx.order, ctx.fused), None, None


def _at(x: Tensor, index: Tensor, complete: bool) -> Tensor:
    """x [n, width] at an index of any shape; zeros for an index of n."""
    if complete:
        return x.index_select(0, index) if index.ndim == 1 else x[index]
    if not len(x):
        return x.new_zeros(*index.shape, x.shape[1])
    return torch.where((index < len(x))[..., None], x[index.clamp(max=len(x) - 1)], 0.0)


def _taken(x: Tensor, order: Order, fused: bool) -> Tensor:
    if fused and not order.all_hold:
        return as_one_kernel(_at, x, order.token, False, sizes_vary=True)
    return _at(x, order.token, order.all_hold)


def _sums(rows: Tensor, order: Order, fused: bool) -> Tensor:
    """The sum of each token's rows, in fp32, rounded once: [rows, width] → [tokens, width]."""
    if order.row.shape[1] == 1:
        return _at(rows, order.row[:, 0], order.all_kept)
    if fused:
        return as_one_kernel(_sum_one_by_one, rows, order.row, order.all_kept, rows_vary=True)
    return _at(rows, order.row, order.all_kept).sum(1)


def _sum_one_by_one(rows: Tensor, index: Tensor, complete: bool) -> Tensor:
    """Addition after addition: Inductor gives a sum over so few a kernel that reads memory in short pieces."""
    total = _at(rows, index[:, 0], complete).float()
    for choice in range(1, index.shape[1]):
        total = total + _at(rows, index[:, choice], complete).float()
    return total.to(rows.dtype)
