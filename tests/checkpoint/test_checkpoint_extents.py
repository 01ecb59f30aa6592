"""Boxes: what two have in common, and whether some cover a tensor, against marking every element."""

import random

import pytest
import torch

from megalith.checkpoint.extent import Extent, covers_exactly


def random_extent(rng: random.Random, shape: tuple[int, ...]) -> Extent:
    offset = tuple(rng.randrange(size) for size in shape)
    return Extent(offset, tuple(rng.randint(1, size - at) for size, at in zip(shape, offset)))


def cut(rng: random.Random, extent: Extent, times: int) -> list[Extent]:
    """A box cut into parts that cover it, in no order."""
    parts = [extent]
    for _ in range(times):
        part = parts.pop(rng.randrange(len(parts)))
        dim = rng.randrange(len(part.shape))
        if part.shape[dim] < 2:
            parts.append(part)
            continue
        at = rng.randint(1, part.shape[dim] - 1)
        first = (*part.shape[:dim], at, *part.shape[dim + 1 :])
        rest = (*part.shape[:dim], part.shape[dim] - at, *part.shape[dim + 1 :])
        moved = (*part.offset[:dim], part.offset[dim] + at, *part.offset[dim + 1 :])
        parts += [Extent(part.offset, first), Extent(moved, rest)]
    rng.shuffle(parts)
    return parts


def marks(shape: tuple[int, ...], extents: list[Extent]) -> torch.Tensor:
    """How many of the boxes have each element."""
    count = torch.zeros(shape, dtype=torch.int64)
    for extent in extents:
        count[extent.slices(Extent.full(shape))] += 1
    return count


SHAPES = [(7,), (5, 6), (4, 3, 5), (2, 3, 2, 4)]


@pytest.mark.parametrize("shape", SHAPES)
def test_what_two_boxes_have_in_common_is_what_both_mark(shape):
    rng = random.Random(len(shape))
    for _ in range(200):
        a, b = random_extent(rng, shape), random_extent(rng, shape)
        both = marks(shape, [a, b]) == 2
        met = a.intersection(b)
        assert torch.equal(both, marks(shape, [met] if met else []) == 1)
        if met:
            inside = torch.zeros(a.shape)
            inside[met.slices(a)] = 1
            assert torch.equal(inside == 1, both[a.slices(Extent.full(shape))])


@pytest.mark.parametrize("shape", SHAPES)
def test_only_boxes_that_have_each_element_once_fill_a_tensor(shape):
    rng = random.Random(10 + len(shape))
    for _ in range(200):
        parts = cut(rng, Extent.full(shape), rng.randint(0, 12))
        assert covers_exactly(shape, parts)
        spoilt = list(parts)
        match rng.randrange(3):
            case 0:
                spoilt.pop()
            case 1:
                spoilt.append(rng.choice(parts))
            case 2:
                spoilt[0] = random_extent(rng, shape)
        assert covers_exactly(shape, spoilt) == bool((marks(shape, spoilt) == 1).all())


def test_boxes_outside_the_tensor_or_of_another_rank_do_not_fill_it():
    assert not covers_exactly((4,), [Extent((0,), (5,))])
    assert not covers_exactly((4,), [Extent((-1,), (4,))])
    assert not covers_exactly((4,), [Extent((1,), (4,))])
    assert not covers_exactly((4,), [Extent((0, 0), (4, 1))])
    assert not covers_exactly((4,), [Extent((0,), (4,)), Extent((0,), (0,))])


def test_scalars_and_empty_tensors():
    assert covers_exactly((), [Extent((), ())])
    assert not covers_exactly((), []) and not covers_exactly((), [Extent((), ())] * 2)
    assert covers_exactly((0, 4), []) and not covers_exactly((0, 4), [Extent((0, 0), (0, 4))])
