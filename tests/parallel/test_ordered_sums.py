"""The order of sums in which the number of ranks does not matter."""

import pytest

from megalith.parallel.data.ordered_sums import sum_in_order


def ordered(rows: int, ranks: int) -> str:
    """The sum of rows by name, added on each rank, then over the ranks."""

    def of_rank(rank: int) -> str:
        return sum_in_order(range(rows // ranks), lambda row: str(rank + ranks * row), add)

    return sum_in_order(range(ranks), of_rank, add)


def add(a: str, b: str) -> str:
    return f"({a} {b})"


def test_the_tree_splits_rows_by_their_lowest_bit():
    assert ordered(5, 1) == "(((0 4) 2) (1 3))"


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 8, 12, 16, 24, 40])
def test_every_power_of_two_of_ranks_adds_alike(rows):
    sums = {ordered(rows, ranks) for ranks in (1, 2, 4, 8) if rows % ranks == 0}
    assert len(sums) == 1
