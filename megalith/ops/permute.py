"""Reordering of tokens by expert, and back.

With topk experts per token there are tokens · topk pairs of token and expert; each becomes a row of the experts' input.
`take_rows` gathers the rows, and `sum_rows` sums each token's rows. Each is the gradient of the other, so neither
direction adds atomically and results do not depend on the order of additions.

With a capacity, dropped pairs have no row, and rows that pad an expert have no pair; both read zeros. So do pairs whose
expert is on another rank. Rows after the last one in an oversized buffer (`sort_pairs_in_buffer`) are undefined.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.ops import kernels
from megalith.ops.compiled import as_one_kernel

BLOCK = 1024  # tokens per scan


@dataclass(frozen=True)
class Permutation:
    """Maps each row to its token, and each token to its rows."""

    token: Tensor  # int64 [rows]; the number of tokens for a padding row
    row: Tensor  # int64 [tokens, topk]; the number of rows, or more, for a pair without a row
    all_kept: bool = True  # every pair has a row
    all_hold: bool = True  # every row has a token
    end: Tensor | None = None  # int32 [1], in an oversized buffer: end of the rows with a token

    def inverse(self) -> Permutation:
        """Return the inverse of a permutation with one row per token."""
        return Permutation(self.row.flatten(), self.token[:, None])


def transpose_blocks(sizes: Tensor, rows: int) -> Permutation:
    """Return the permutation that reorders consecutive blocks of rows from [m, n] to [n, m] order.

    sizes is int64 [m, n]; `rows` is their sum.
    """
    return Permutation(*as_one_kernel(_transposed, sizes, rows, sizes_vary=True))


def _transposed(sizes: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the fields `token` and `row` of the Permutation of `transpose_blocks`."""
    across = sizes.T
    begin = group_starts(sizes.flatten()).view_as(sizes)
    end = group_starts(across.flatten()).view_as(across).T
    index = torch.arange(rows, device=sizes.device)
    row = index + (end - begin).flatten().repeat_interleave(sizes.flatten(), output_size=rows)
    token = index + (begin - end).T.flatten().repeat_interleave(across.flatten(), output_size=rows)
    return token, row[:, None]


def count_destinations(groups: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Count tokens per group.

    Args:
        groups: int64 [tokens, n], groups of each token, below `count`. A repeated group counts once.
        count: number of groups.

    Returns:
        Tokens per group, int64 [count]; number of earlier tokens in the group, int32 [tokens, count]; membership, 0 or
            1, int32 [tokens, count].
    """
    tokens = len(groups)
    blocks = -(-tokens // BLOCK)
    has = torch.zeros(count, blocks * BLOCK, dtype=torch.int32, device=groups.device).scatter(0, groups.T, 1)
    # Scan blocks first: in a single scan over all tokens, the kernel's programs would wait for each other.
    upto = has.view(count, blocks, BLOCK).cumsum(2, dtype=torch.int32)
    sizes = upto[..., -1]
    upto = upto + (sizes.cumsum(1, dtype=torch.int32) - sizes)[..., None]
    return sizes.sum(1), (upto.flatten(1) - has)[:, :tokens].T, has[:, :tokens].T


def group_starts(sizes: Tensor) -> Tensor:
    """Return the start of each group, for consecutive groups with sizes int64 [n]."""
    return sizes.cumsum(0) - sizes


def sort_pairs(destinations: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the (token, destination) pairs int64 [tokens, topk] by destination, without waiting for the device.

    Pairs with the destination `count` are dropped pairs and come last. All other destinations of a token must differ.

    Returns:
        Pairs per destination, int64 [count]; sorted pair numbers, int64 [tokens · topk]; position of each pair in this
        order, int64 [tokens, topk].
    """
    sizes, before, _ = count_destinations(destinations, count + 1)
    row = group_starts(sizes)[destinations] + before.gather(1, destinations)
    return sizes[:count], inverse(row.flatten(), row.numel()), row


def sort_pairs_in_buffer(destinations: Tensor, count: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort (token, destination) pairs as `sort_pairs` does, into a buffer of `rows` rows.

    The buffer is large enough for all pairs that are not dropped. The sorted pair numbers are int64 [rows]; after the
    last pair they are the total number of pairs. Dropped pairs have the position `rows`.
    """
    sizes, before, _ = count_destinations(destinations, count + 1)
    row = group_starts(sizes)[destinations] + before.gather(1, destinations)
    row = torch.where(destinations < count, row, rows)
    pairs = torch.arange(row.numel(), dtype=torch.int32, device=row.device)
    buffer = torch.full((rows + 1,), row.numel(), dtype=torch.int32, device=row.device)
    return sizes[:count], buffer.scatter(0, row.flatten(), pairs)[:-1].long(), row


def replicate_tokens(sizes: Tensor, before: Tensor, has: Tensor) -> tuple[Tensor, Tensor]:
    """List each token once per group that it belongs to, ordered by group, then by token.

    Arguments come from `count_destinations`.

    Returns:
        Token of each copy, int64 [tokens · count + 1], undefined after the last copy; position of each token's copy in
            each group, int64 [tokens, count]. A token that is not in a group has a position after all copies.
    """
    last = has.numel()
    row = torch.where(has == 1, group_starts(sizes) + before, last)
    return inverse(row.flatten(), last + 1) // len(sizes), row


def inverse(row: Tensor, rows: int) -> Tensor:
    """Return the inverse of a placement: for each of `rows` positions, int64 [rows], the index of the element there.
    `row` has the elements' positions, int64 [n].
    """
    elements = torch.empty(rows, dtype=torch.int32, device=row.device)
    return elements.scatter(0, row, torch.arange(len(row), dtype=torch.int32, device=row.device)).long()


def index_in_group(groups: Tensor, count: int) -> Tensor:
    """Return each element's index within its group, for sorted groups int64 [n] below `count`."""
    return torch.arange(len(groups), device=groups.device) - group_starts(count_values(groups, count))[groups]


def count_values(values: Tensor, count: int) -> Tensor:
    """Count the occurrences of 0 … count - 1 in values int64 [n], without waiting for the device.

    Returns int64 [count]. Adds in int32, because Inductor has no single kernel for additions in int64.
    """
    ones = values.new_ones((), dtype=torch.int32).expand_as(values)
    return values.new_zeros(count, dtype=torch.int32).scatter_add(0, values, ones).long()


def take_rows(x: Tensor, order: Permutation, fused: bool = False) -> Tensor:
    """Gather the rows [rows, width] of tokens x [tokens, width].

    `fused`: the gradient is one compiled kernel on a GPU.
    """
    return _TakeRows.apply(x, order, fused)


def sum_rows(rows: Tensor, order: Permutation, fused: bool = False, in_order: bool = False) -> Tensor:
    """Sum each token's rows: [rows, width] → [tokens, width].

    `fused`: use one compiled kernel on a GPU. `in_order`: add rows one by one, in the order of the token's experts,
    without a compiled kernel.
    """
    return _SumRows.apply(rows, order, fused, in_order)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, order: Permutation, fused: bool) -> Tensor:
        ctx.order, ctx.fused = order, fused
        return _gather_rows(x, order, fused)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _sums(grad, ctx.order, ctx.fused), None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, order: Permutation, fused: bool, in_order: bool) -> Tensor:
        ctx.order, ctx.fused = order, fused
        return one_by_one(rows, order.row, order.all_kept) if in_order else _sums(rows, order, fused)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _gather_rows(grad, ctx.order, ctx.fused), None, None, None


def rows_at(x: Tensor, index: Tensor, complete: bool) -> Tensor:
    """Return rows of x [n, width] by an index of any shape. Rows for indices of n or more are zeros.

    `complete`: no index is n or more.
    """
    if complete:
        return x.index_select(0, index) if index.ndim == 1 else x[index]
    if not len(x):
        return x.new_zeros(*index.shape, x.shape[1])
    return torch.where((index < len(x))[..., None], x[index.clamp(max=len(x) - 1)], 0.0)


def _gather_rows(x: Tensor, order: Permutation, fused: bool) -> Tensor:
    if fused and order.end is not None and kernels.AVAILABLE and x.is_cuda:
        return kernels.take_rows(x.contiguous(), order.token, order.end)
    if fused and not order.all_hold:
        return as_one_kernel(rows_at, x, order.token, False, sizes_vary=True)
    return rows_at(x, order.token, order.all_hold)


def _sums(rows: Tensor, order: Permutation, fused: bool) -> Tensor:
    """Sum each token's rows in fp32 and round once: [rows, width] → [tokens, width]."""
    if order.row.shape[1] == 1:
        return rows_at(rows, order.row[:, 0], order.all_kept)
    if fused:
        vary = dict(rows_vary=True) if order.end is None else dict(sizes_vary=True)
        return as_one_kernel(sum_at, rows, order.row, order.all_kept, **vary)
    return sum_at(rows, order.row, order.all_kept)


def sum_at(rows: Tensor, index: Tensor, complete: bool) -> Tensor:
    """Sum the rows [rows, width] at index [n, m] in at least fp32, rounding once. Returns [n, width].

    Compiled code adds one by one, because Inductor's kernel for a sum over few rows reads memory in short pieces.
    """
    if not torch.compiler.is_compiling():
        return rows_at(rows, index, complete).sum(1)
    return one_by_one(rows, index, complete)


def one_by_one(rows: Tensor, index: Tensor, complete: bool) -> Tensor:
    """Compute `sum_at` by adding the columns of `index` in order."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = rows_at(rows, index[:, 0], complete).to(wide)
    for choice in range(1, index.shape[1]):
        total = total + rows_at(rows, index[:, choice], complete).to(wide)
    return total.to(rows.dtype)
