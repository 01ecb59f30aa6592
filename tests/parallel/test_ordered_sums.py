"""The order of sums in which the number of ranks does not matter, and a norm in which the shards do not."""

import pytest
import torch

from megalith.comm.collectives import Axis
from megalith.parallel.data.gradient_norm import OrderFreeGradientSquares
from megalith.parallel.data.ordered_sums import OrderedGradients, additions


def total(terms: list[str], neighbours: bool) -> str:
    sums: list[str] = []
    for term, count in additions(len(terms), neighbours):
        name = terms[term]
        for _ in range(count):
            name = f"({sums.pop()} {name})"
        sums.append(name)
    (name,) = sums
    return name


def ordered(rows: int, ranks: int) -> str:
    """The sum of rows by name, added on each rank, then over the ranks."""
    of_ranks = [total([str(row) for row in range(rank, rows, ranks)], False) for rank in range(ranks)]
    return total(of_ranks, False)


def ordered_shards(rows: int, ranks: int) -> str:
    """The sum of rows by name, added over the ranks after each pass, then over the passes."""
    passes = [
        total([str(row) for row in range(first, first + ranks)], True) for first in range(0, rows, ranks)
    ]
    return total(passes, True)


def test_the_trees_split_rows_by_their_lowest_and_by_their_highest_bit():
    assert ordered(5, 1) == "(((0 4) 2) (1 3))"
    assert ordered_shards(7, 1) == "(((0 1) (2 3)) ((4 5) 6))"


@pytest.mark.parametrize("of", [ordered, ordered_shards])
@pytest.mark.parametrize("rows", [1, 2, 3, 6, 8, 12, 16, 24, 40])
def test_every_power_of_two_of_ranks_adds_alike(rows, of):
    sums = {of(rows, ranks) for ranks in (1, 2, 4, 8) if rows % ranks == 0}
    assert len(sums) == 1


def test_gradients_are_summed_in_the_order_and_a_missing_one_is_zero():
    one, rarely = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    order = additions(5)
    sums = OrderedGradients([one, rarely], order)
    for row, _ in order:
        one.grad = torch.full((3,), 2.0**row)
        rarely.grad = torch.ones(3) if row in (1, 3) else None
        sums.add_pass()
    assert one.grad.tolist() == [31.0] * 3 and rarely.grad.tolist() == [2.0] * 3


class OneParameter:
    """Stands for LocalParameters of one shard."""

    def __init__(self, values: torch.Tensor):
        self.named = [("weight", values)]
        self.shards = {"weight": type("Shard", (), {"owned": True})}


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e15])
def test_a_norm_has_the_same_bits_for_every_split_of_the_gradient(scale):
    weight = torch.nn.Parameter(torch.zeros(100_003))
    squares = OrderFreeGradientSquares(OneParameter(weight), Axis(), None)
    weight.grad = scale * torch.randn(100_003) * torch.logspace(-8, 0, 100_003)
    expected = weight.grad.double().square().sum()
    found = squares([weight])
    assert abs(found.double() / expected - 1) < 1e-6
    for pieces in (2, 7, 1000):
        assert squares._squares(list(weight.grad.flip(0).chunk(pieces))).item() == found.item()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_norm_of_a_nonfinite_gradient_is_not_finite(value):
    weight = torch.nn.Parameter(torch.zeros(5))
    weight.grad = torch.tensor([0.0, 1.0, value, 2.0, 3.0])
    assert not OrderFreeGradientSquares(OneParameter(weight), Axis(), None)([weight]).isfinite()
    weight.grad = torch.zeros(5)
    assert OrderFreeGradientSquares(OneParameter(weight), Axis(), None)([weight]) == 0
