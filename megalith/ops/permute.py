"""Tokens brought into the order of their experts, and back.

A token goes to topk experts, so there are tokens · topk pairs of a token and an expert. Each becomes a row of the
experts' input. `take_rows` makes the rows, `sum_rows` gives each token the sum of its rows; each is the gradient of
the other, so that neither direction adds into memory and the result does not depend on an order of additions.

With a capacity some pairs have no row, for they were dropped, and some rows no pair, for they fill an expert up. Both
read zeros. So do pairs whose expert is elsewhere. Rows behind the last one in a buffer that would hold any number of
them (`sort_pairs_in_buffer`) may hold anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.ops import kernels
from megalith.ops.compiled import as_one_kernel

BLOCK = 1024  # tokens that one scan goes over


@dataclass(frozen=True)
class Permutation:
    """Which token each row is of, and where the rows of each token are."""

    token: Tensor  # int64 [rows]; the number of tokens for a row that fills up
    row: Tensor  # int64 [tokens, topk]; the number of rows, or more, for a pair without one
    all_kept: bool = True  # every pair has a row
    all_hold: bool = True  # every row is of a token
    end: Tensor | None = None  # int32 [1], in a buffer of any number of rows: where those of a token end

    def inverse(self) -> Permutation:
        """Of rows that are only reordered, back: rows in this order become those it was made of."""
        return Permutation(self.row.flatten(), self.token[:, None])


def transpose_blocks(sizes: Tensor, rows: int) -> Permutation:
    """Blocks of rows one after the other, sizes int64 [m, n] of them, which stood in [m, n] and shall in [n, m].

    `rows` is how many there are of all blocks.
    """
    return Permutation(*as_one_kernel(_transposed, sizes, rows, sizes_vary=True))


def _transposed(sizes: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """`token` and `row` of that Permutation: a row moves as far as its block."""
    across = sizes.T
    begin = group_starts(sizes.flatten()).view_as(sizes)
    end = group_starts(across.flatten()).view_as(across).T
    place = torch.arange(rows, device=sizes.device)
    row = place + (end - begin).flatten().repeat_interleave(sizes.flatten(), output_size=rows)
    token = place + (begin - end).T.flatten().repeat_interleave(across.flatten(), output_size=rows)
    return token, row[:, None]


def count_destinations(groups: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """How many tokens have each group, int64 [count]; of these how many stand before each token, int32 [tokens, count];
    and whether it has the group, int32 [tokens, count].

    groups int64 [tokens, n], below `count`, are of each token. One that a token names twice is counted once.
    """
    tokens = len(groups)
    blocks = -(-tokens // BLOCK)
    has = torch.zeros(count, blocks * BLOCK, dtype=torch.int32, device=groups.device).scatter(0, groups.T, 1)
    # Blocks first: one scan over all tokens would be a kernel whose parts wait for each other.
    upto = has.view(count, blocks, BLOCK).cumsum(2, dtype=torch.int32)
    sizes = upto[..., -1]
    upto = upto + (sizes.cumsum(1, dtype=torch.int32) - sizes)[..., None]
    return sizes.sum(1), (upto.flatten(1) - has)[:, :tokens].T, has[:, :tokens].T


def group_starts(sizes: Tensor) -> Tensor:
    """Where groups of these sizes, int64 [n], start that stand one after the other."""
    return sizes.cumsum(0) - sizes


def sort_pairs(destinations: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of destinations int64 [tokens, topk] sorted by destination, without waiting for the device.

    Returns how many there are of each of `count`, int64 [count]; the sorted pairs, int64 [tokens · topk]; and where
    each stands, int64 [tokens, topk]. The destination `count` is nowhere: of such pairs nothing is known but that they
    stand behind all others. The destinations of a token differ, but for that one.
    """
    sizes, before, _ = count_destinations(destinations, count + 1)
    row = group_starts(sizes)[destinations] + before.gather(1, destinations)
    return sizes[:count], inverse(row.flatten(), row.numel()), row


def sort_pairs_in_buffer(destinations: Tensor, count: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """As sorted_pairs, in a buffer of so many `rows` that all pairs with a destination have one.

    The sorted pairs are int64 [rows], behind the last one the number of all pairs; and a pair without a destination
    stands at `rows`, behind all of them.
    """
    sizes, before, _ = count_destinations(destinations, count + 1)
    row = group_starts(sizes)[destinations] + before.gather(1, destinations)
    row = torch.where(destinations < count, row, rows)
    pairs = torch.arange(row.numel(), dtype=torch.int32, device=row.device)
    held = torch.full((rows + 1,), row.numel(), dtype=torch.int32, device=row.device)
    return sizes[:count], held.scatter(0, row.flatten(), pairs)[:-1].long(), row


def replicate_tokens(sizes: Tensor, before: Tensor, has: Tensor) -> tuple[Tensor, Tensor]:
    """Each token once for each group that it has, by group and in the tokens' order; the arguments are as of `count_destinations`.

    Returns the token of each copy, int64 [tokens · count + 1], of which what is behind the last one means nothing; and
    where the copies of each token are, int64 [tokens, count], behind all of them where it has none.
    """
    last = has.numel()
    row = torch.where(has == 1, group_starts(sizes) + before, last)
    return inverse(row.flatten(), last + 1) // len(sizes), row


def inverse(row: Tensor, rows: int) -> Tensor:
    """Which element goes to each of `rows` places, int64 [rows], where row int64 [n] says where each goes."""
    held = torch.empty(rows, dtype=torch.int32, device=row.device)
    return held.scatter(0, row, torch.arange(len(row), dtype=torch.int32, device=row.device)).long()


def index_in_group(groups: Tensor, count: int) -> Tensor:
    """Where each element stands among those of its group, from 0: groups int64 [n] is sorted, below `count`."""
    return torch.arange(len(groups), device=groups.device) - group_starts(count_values(groups, count))[groups]


def count_values(values: Tensor, count: int) -> Tensor:
    """How often each of 0 … count - 1 occurs in values int64 [n]: int64 [count], without waiting for the device.

    Added up in int32: compiled, what is added in int64 is no kernel of its own but several steps.
    """
    ones = values.new_ones((), dtype=torch.int32).expand_as(values)
    return values.new_zeros(count, dtype=torch.int32).scatter_add(0, values, ones).long()


def take_rows(x: Tensor, order: Permutation, fused: bool = False) -> Tensor:
    """The rows [rows, width] of the tokens x [tokens, width]. `fused`: its gradient is one compiled kernel on a GPU."""
    return _TakeRows.apply(x, order, fused)


def sum_rows(rows: Tensor, order: Permutation, fused: bool = False) -> Tensor:
    """The sum of each token's rows: [rows, width] → [tokens, width]. `fused`: in one compiled kernel on a GPU."""
    return _SumRows.apply(rows, order, fused)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, order: Permutation, fused: bool) -> Tensor:
        ctx.order, ctx.fused = order, fused
        return _taken(x, order, fused)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _sums(grad, ctx.order, ctx.fused), None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, order: Permutation, fused: bool) -> Tensor:
        ctx.order, ctx.fused = order, fused
        return _sums(rows, order, fused)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _taken(grad, ctx.order, ctx.fused), None, None


def rows_at(x: Tensor, index: Tensor, complete: bool) -> Tensor:
    """x [n, width] at an index of any shape; zeros for an index of n or more."""
    if complete:
        return x.index_select(0, index) if index.ndim == 1 else x[index]
    if not len(x):
        return x.new_zeros(*index.shape, x.shape[1])
    return torch.where((index < len(x))[..., None], x[index.clamp(max=len(x) - 1)], 0.0)


def _taken(x: Tensor, order: Permutation, fused: bool) -> Tensor:
    if fused and order.end is not None and kernels.AVAILABLE and x.is_cuda:
        return kernels.take_rows(x.contiguous(), order.token, order.end)
    if fused and not order.all_hold:
        return as_one_kernel(rows_at, x, order.token, False, sizes_vary=True)
    return rows_at(x, order.token, order.all_hold)


def _sums(rows: Tensor, order: Permutation, fused: bool) -> Tensor:
    """The sum of each token's rows, in fp32, rounded once: [rows, width] → [tokens, width]."""
    if order.row.shape[1] == 1:
        return rows_at(rows, order.row[:, 0], order.all_kept)
    if fused:
        vary = dict(rows_vary=True) if order.end is None else dict(sizes_vary=True)
        return as_one_kernel(sum_at, rows, order.row, order.all_kept, **vary)
    return sum_at(rows, order.row, order.all_kept)


def sum_at(rows: Tensor, index: Tensor, complete: bool) -> Tensor:
    """The sums of the rows [rows, width] at index [n, m], in fp32 at least, rounded once: [n, width].

    Compiled, addition after addition: Inductor gives a sum over so few a kernel that reads memory in short pieces.
    """
    if not torch.compiler.is_compiling():
        return rows_at(rows, index, complete).sum(1)
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = rows_at(rows, index[:, 0], complete).to(wide)
    for choice in range(1, index.shape[1]):
        total = total + rows_at(rows, index[:, choice], complete).to(wide)
    return total.to(rows.dtype)
