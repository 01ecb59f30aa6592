"""Sums of gradients in an order that does not depend on the data-parallel size (train.batch_invariant).

Of R ranks, rank r has the rows r, r + R, r + 2R, … of a step. The rows are the leaves of a binary tree. With R = 2^k:

     no_shard    splits rows by the lowest bit of their index first: (0, 4, …) + (2, 6, …), … The rows of a rank are a
                 subtree, k levels below the root. Each rank adds its own rows; the levels above add the ranks' sums.
     sharded     splits them by the highest bit first, so neighbours are added: (0 + 1) + (2 + 3), … The ranks' rows
                 of one pass are a subtree, which their reduce-scatter adds; each rank adds the passes' sums.

A rank holds one partial sum per level of its part of the tree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from megalith.comm.collectives import Axis, all_gather_no_grad
from megalith.local_shards import local


def additions(count: int, neighbours: bool = False) -> list[tuple[int, int]]:
    """Return the order in which a binary tree sums `count` terms.

    Args:
        count: number of terms, at least one.
        neighbours: split the terms by the highest bit of their index first. Default: by the lowest bit.

    Returns:
        A pair per term, in order: the term's index, and the number of times that the two newest partial sums are then
            added to each other.
    """
    bits = range((count - 1).bit_length())
    return _additions(range(count), [*reversed(bits)] if neighbours else [*bits])


def _additions(terms: Sequence[int], bits: Sequence[int]) -> list[tuple[int, int]]:
    if len(terms) == 1:
        return [(terms[0], 0)]
    halves = [[term for term in terms if term >> bits[0] & 1 == odd] for odd in (0, 1)]
    parts = [_additions(half, bits[1:]) for half in halves if half]
    if len(parts) == 1:
        return parts[0]
    (term, count) = parts[1][-1]
    return [*parts[0], *parts[1][:-1], (term, count + 1)]


class OrderedGradients:
    """Accumulates a step's gradients pass by pass. The passes must run in the order of their terms in `additions`."""

    def __init__(self, parameters: Iterable[nn.Parameter], order: Iterable[tuple[int, int]]):
        """Prepare for the parameters of one model chunk, whose `.grad` must be None. `order` is a result of
        `additions`.
        """
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._counts = deque(count for _, count in order)
        self._sums: list[list[Tensor | None]] = []
        self._begun: deque[list[Tensor | None]] = deque()

    def begin_pass(self) -> None:
        """Set aside the gradients of a backward pass whose weight gradients are computed later (zero-bubble)."""
        self._begun.append(self._take())

    def _take(self) -> list[Tensor | None]:
        gradients = [parameter.grad for parameter in self._trained]
        for parameter in self._trained:
            parameter.grad = None
        return gradients

    @torch.no_grad()
    def add_pass(self) -> None:
        """Accumulate the gradients of a complete backward pass. After the last one, `.grad` is the sum.

        If `begin_pass` has set gradients aside, add them too: the oldest ones belong to the weight gradients that are
        now in `.grad`.
        """
        gradients = self._take()
        if self._begun:
            gradients = _add_gradients(self._begun.popleft(), gradients)
        for _ in range(self._counts.popleft()):
            gradients = _add_gradients(self._sums.pop(), gradients)
        self._sums.append(gradients)
        if not self._counts:
            for parameter, gradient in zip(self._trained, gradients, strict=True):
                parameter.grad = gradient


def _add_gradients(
    gradients: Sequence[Tensor | None], others: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the sums of both lists, in the memory of the first list. None stands for zero."""
    for a, b in zip(gradients, others, strict=True):
        if a is not None and b is not None:
            local(a).add_(local(b))
    return [b if a is None else a for a, b in zip(gradients, others, strict=True)]


def sum_over_ranks(parts: Tensor, neighbours: bool = False) -> Tensor:
    """Return the sum of [ranks, ...] over dimension 0, added by the tree of the ranks."""
    sums: list[Tensor] = []
    for rank, count in additions(len(parts), neighbours):
        total = parts[rank]
        for _ in range(count):
            total = sums.pop() + total
        sums.append(total)
    return sums[0]


def all_reduce_in_order(gradients: Sequence[Tensor], axis: Axis) -> None:
    """Replace the gradients by their sums over the ranks of an axis, added by the tree of the ranks."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    total = sum_over_ranks(all_gather_no_grad(flat[None], axis))
    for gradient, part in zip(gradients, total.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(part.view_as(gradient))
