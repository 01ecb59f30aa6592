"""Orders of rows against lists made in Python, and rows taken and summed by them."""

import pytest
import torch

from megalith.ops.permute import copies, copies_order, sum_rows, take_rows, transposed


@pytest.mark.parametrize("sizes", [[[1, 0, 3], [2, 2, 0]], [[0, 0], [0, 0], [0, 0]], [[4], [1]]], ids=str)
def test_blocks_change_places_whole(sizes):
    sizes = torch.tensor(sizes)
    places, numbers = sizes.shape
    rows = torch.arange(sizes.sum())
    blocks = rows.split(sizes.flatten().tolist())
    expected = [blocks[place * numbers + number] for number in range(numbers) for place in range(places)]
    order = transposed(sizes, len(rows))
    assert order.pair.tolist() == torch.cat(expected).tolist()
    there = take_rows(rows[:, None], order)
    assert torch.equal(take_rows(there, order.inverse()), rows[:, None])


def test_a_token_is_copied_once_for_each_place_and_its_copies_are_summed():
    places = torch.tensor([[0, 2, 0], [3, 3, 3], [2, 1, 3], [0, 1, 2]])  # 3 is none
    counts, *found = copies(places, 3)
    assert counts.tolist() == [2, 2, 3]
    order = copies_order(*found, 7)
    x = torch.randn(4, 5, requires_grad=True)
    rows = take_rows(x, order)
    assert torch.equal(rows, x[[0, 3, 2, 3, 0, 2, 3]])
    wanted = torch.tensor([2.0, 0.0, 2.0, 3.0])[:, None]
    assert torch.equal(sum_rows(rows, order), x * wanted)
    rows.sum().backward()
    assert torch.equal(x.grad, wanted.expand(4, 5))
    counts, *found = copies(torch.full((4, 2), 3), 3)
    nowhere = copies_order(*found, 0)
    assert counts.tolist() == [0, 0, 0]
    assert not sum_rows(take_rows(x, nowhere), nowhere).any()
