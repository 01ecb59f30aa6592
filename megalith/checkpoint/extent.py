"""Extents: n-dimensional boxes within a global tensor, and their intersections.

Every layout's shards are boxes: rows under ZeRO, rows or columns under tensor parallelism, experts first under expert
parallelism. Checkpoints therefore need no description of layouts: a reader intersects the boxes that it needs with the
stored boxes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Extent:
    """A box: offset in the global tensor and shape, per dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def full(cls, shape: Sequence[int]) -> Extent:
        """Return the extent of a complete tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def end(self) -> tuple[int, ...]:
        """End of the box in each dimension, exclusive."""
        return tuple(at + size for at, size in zip(self.offset, self.shape))

    @property
    def volume(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.shape)

    def intersection(self, other: Extent) -> Extent | None:
        """Return the intersection of two boxes, or None if it is empty."""
        start = tuple(max(a, b) for a, b in zip(self.offset, other.offset))
        size = tuple(min(a, b) - at for a, b, at in zip(self.end, other.end, start))
        return Extent(start, size) if all(length > 0 for length in size) else None

    def slices(self, outer: Extent) -> tuple[slice, ...]:
        """Return the slices of this box in a tensor that holds the box `outer`."""
        return tuple(
            slice(at - base, at - base + size)
            for at, base, size in zip(self.offset, outer.offset, self.shape)
        )


def covers_exactly(shape: Sequence[int], extents: Sequence[Extent]) -> bool:
    """Return True if the boxes cover a tensor of this shape with each element exactly once."""
    covered = 0
    for extent in extents:
        if not len(extent.offset) == len(extent.shape) == len(shape):
            return False
        if any(
            at < 0 or size < 1 or at + size > n for at, size, n in zip(extent.offset, extent.shape, shape)
        ):
            return False
        covered += extent.volume
    return covered == math.prod(shape) and _are_disjoint(extents)


def _are_disjoint(extents: Sequence[Extent]) -> bool:
    """Return True if no two boxes overlap. Fast for shards, which divide one dimension at a time."""
    for dim in range(len(extents[0].offset) if len(extents) > 1 else 0):
        groups: dict[tuple[int, int], list[Extent]] = {}
        for extent in extents:
            start = extent.offset[dim]
            groups.setdefault((start, start + extent.shape[dim]), []).append(extent)
        spans = sorted(groups)
        if len(spans) > 1 and all(before[1] <= after[0] for before, after in pairwise(spans)):
            return all(_are_disjoint(group) for group in groups.values())
    return all(a.intersection(b) is None for i, a in enumerate(extents) for b in extents[:i])
