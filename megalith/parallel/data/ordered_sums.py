"""Sums of gradients in an order that does not depend on the data-parallel size (train.batch_invariant).

Of R ranks, rank r has the rows r, r + R, r + 2R, … of a step. The rows are the leaves of a binary tree that splits them
by their numbers' lowest bit first:

     all rows = (even rows) + (odd rows)        even rows = (0, 4, 8, …) + (2, 6, 10, …)        …

With R = 2^k, the rows of a rank are a subtree, k levels below the root: each rank sums its own, and the ranks' sums are
gathered and added by the levels above. A rank holds one sum per level of its subtree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from megalith.comm.collectives import Axis, all_gather_no_grad

T = TypeVar("T")


def sum_in_order(
    indices: Sequence[int], leaf: Callable[[int], T], add: Callable[[T, T], T], bit: int = 0
) -> T:
    """Return the sum of leaves, added by the tree of their indices.

    Args:
        indices: different indices, at least one.
        leaf: returns the value of an index. It is called once per index, and its value is added before the tree needs
            others.
        add: adds two values; it may reuse the first one's memory.
        bit: bits of the indices that are equal, from the lowest.
    """
    if len(indices) == 1:
        return leaf(indices[0])
    halves = [[index for index in indices if index >> bit & 1 == odd] for odd in (0, 1)]
    sums = [sum_in_order(half, leaf, add, bit + 1) for half in halves if half]
    return sums[0] if len(sums) == 1 else add(*sums)


def accumulate_in_order(
    parameters: Iterable[nn.Parameter], rows: int, run_row: Callable[[int], None]
) -> None:
    """Run rows in the tree's order, and add the sum of their gradients to the parameters' `.grad`.

    Args:
        parameters: those with gradients, and others.
        rows: number of rows.
        run_row: runs the forward and backward pass of the row with this index.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]

    def take_gradients() -> list[Tensor | None]:
        gradients = [parameter.grad for parameter in trained]
        for parameter in trained:
            parameter.grad = None
        return gradients

    def gradients_of(index: int) -> list[Tensor | None]:
        run_row(index)
        return take_gradients()

    before = take_gradients()
    total = _add_gradients(before, sum_in_order(range(rows), gradients_of, _add_gradients))
    for parameter, gradient in zip(trained, total, strict=True):
        parameter.grad = gradient


@torch.no_grad()
def _add_gradients(
    gradients: Sequence[Tensor | None], others: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the sums, in the memory of the first gradients. None stands for zero."""
    pairs = zip(gradients, others, strict=True)
    return [b if a is None else a if b is None else a.add_(b) for a, b in pairs]


def all_reduce_in_order(gradients: Sequence[Tensor], axis: Axis) -> None:
    """Replace the gradients by their sums over the ranks of an axis, added by the tree of the ranks."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    gathered = all_gather_no_grad(flat[None], axis)
    total = sum_in_order(range(axis.size), gathered.__getitem__, torch.Tensor.add_)
    for gradient, part in zip(gradients, total.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(part.view_as(gradient))
