"""Tokens brought into the order of their experts, and back.

A token goes to topk experts, so there are tokens · topk pairs of a token and an expert. Each becomes a row of the
experts' input. `take_rows` makes the rows, `sum_rows` gives each token the sum of its rows; each is the gradient of
the other, so that neither direction adds into memory and the result does not depend on an order of additions.

With a capacity some pairs have no row, for they were dropped, and some rows no pair, for they fill an expert up. Both
read zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Order:
    """Which pair each row holds, and where the row of each pair is."""

    pair: Tensor  # int64 [rows]: token · topk + choice; the number of pairs for a row that fills up
    row: Tensor  # int64 [tokens, topk]; the number of rows for a pair without one
    complete: bool = True  # every row holds a pair and every pair has a row

    @property
    def token(self) -> Tensor:
        """The token of each row: int64 [rows], the number of tokens for a row that fills up."""
        return self.pair // self.row.shape[1]

    def by_pair(self) -> Order:
        """The same rows, of pairs instead of tokens: for what each pair has one of."""
        return Order(self.pair, self.row.reshape(-1, 1), self.complete)


def permutation(rows: Tensor) -> Order:
    """The order that takes row rows[i] to place i, where `rows` int64 [n] has each of n numbers."""
    place = torch.empty_like(rows).scatter_(0, rows, torch.arange(len(rows), device=rows.device))
    return Order(rows, place[:, None])


def places_in_group(groups: Tensor, count: int) -> Tensor:
    """Where each element stands among those of its group, from 0: groups int64 [n] is sorted, below `count`."""
    sizes = counted(groups, count)
    starts = sizes.cumsum(0) - sizes
    return torch.arange(len(groups), device=groups.device) - starts[groups]


def counted(values: Tensor, count: int) -> Tensor:
    """How often each of 0 … count - 1 occurs in values int64 [n]: int64 [count], without waiting for the device."""
    return values.new_zeros(count).scatter_add(0, values, torch.ones_like(values))


def take_rows(x: Tensor, order: Order, fused: bool = False) -> Tensor:
    """The rows [rows, width] of the tokens x [tokens, width]. `fused`: its gradient is one compiled kernel."""
    return _TakeRows.apply(x, order, fused)


def sum_rows(rows: Tensor, order: Order, fused: bool = False) -> Tensor:
    """The sum of each token's rows: [rows, width] → [tokens, width]. `fused`: in one compiled kernel."""
    return _SumRows.apply(rows, order, fused)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, order: Order, fused: bool) -> Tensor:
        ctx.order, ctx.fused = order, fused
        return _at(x, order.token, order.complete)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _sums(ctx.fused)(grad, ctx.order.row, ctx.order.complete), None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, order: Order, fused: bool) -> Tensor:
        ctx.order = order
        return _sums(fused)(rows, order.row, order.complete)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _at(grad, ctx.order.token, ctx.order.complete), None, None


def _at(x: Tensor, index: Tensor, complete: bool) -> Tensor:
    """x [n, width] at an index of any shape; zeros for an index of n."""
    if complete:
        return x[index]
    if not len(x):
        return x.new_zeros(*index.shape, x.shape[1])
    return torch.where((index < len(x))[..., None], x[index.clamp(max=len(x) - 1)], 0.0)


def _sum_at(rows: Tensor, index: Tensor, complete: bool) -> Tensor:
    """rows [n, width] at index [tokens, topk], summed over topk."""
    if index.shape[1] == 1:
        return _at(rows, index[:, 0], complete)
    return _at(rows, index, complete).sum(1)


def _sums(fused: bool) -> Callable[[Tensor, Tensor, bool], Tensor]:
    return _compiled() if fused else _sum_at


@cache
def _compiled() -> Callable[[Tensor, Tensor, bool], Tensor]:
    return torch.compile(_sum_at, dynamic=True)
