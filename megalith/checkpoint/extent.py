"""Where a part of a tensor lies: an n-dimensional box in a global tensor, and how boxes meet.

A rank's shard is a box, whatever axes have cut it: rows under ZeRO, rows or columns under tensor parallelism, experts
first under expert parallelism. So what is stored and what is wanted need no names of layouts: a reader of any layout
takes the intersections of its boxes with the stored ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Extent:
    """A box: where it begins in the global tensor, and how long it is, dimension by dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Extent:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def end(self) -> tuple[int, ...]:
        """The first place behind the box, dimension by dimension."""
        return tuple(at + size for at, size in zip(self.offset, self.shape))

    @property
    def volume(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def intersection(self, other: Extent) -> Extent | None:
        """The elements that both have; None when there are none."""
        start = tuple(max(a, b) for a, b in zip(self.offset, other.offset))
        size = tuple(min(a, b) - at for a, b, at in zip(self.end, other.end, start))
        return Extent(start, size) if all(length > 0 for length in size) else None

    def slices(self, outer: Extent) -> tuple[slice, ...]:
        """The indices of this box in a tensor that holds `outer`."""
        return tuple(
            slice(at - base, at - base + size)
            for at, base, size in zip(self.offset, outer.offset, self.shape)
        )


def covers_exactly(shape: Sequence[int], extents: Sequence[Extent]) -> bool:
    """Whether the boxes cover a tensor of this shape, each element once."""
    covered = 0
    for extent in extents:
        if not len(extent.offset) == len(extent.shape) == len(shape):
            return False
        if any(
            at < 0 or size < 1 or at + size > n for at, size, n in zip(extent.offset, extent.shape, shape)
        ):
            return False
        covered += extent.volume
    return covered == math.prod(shape) and _are_apart(extents)


def _are_apart(extents: Sequence[Extent]) -> bool:
    """Whether no two boxes meet. Shards are cut dimension by dimension, which makes this quick."""
    for dim in range(len(extents[0].offset) if len(extents) > 1 else 0):
        groups: dict[tuple[int, int], list[Extent]] = {}
        for extent in extents:
            start = extent.offset[dim]
            groups.setdefault((start, start + extent.shape[dim]), []).append(extent)
        spans = sorted(groups)
        if len(spans) > 1 and all(before[1] <= after[0] for before, after in pairwise(spans)):
            return all(_are_apart(group) for group in groups.values())
    return all(a.intersection(b) is None for i, a in enumerate(extents) for b in extents[:i])
