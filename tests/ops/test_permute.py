"""Orders of rows against lists made in Python, and rows taken and summed by them."""

import pytest
import torch

from megalith.ops.permute import (
    Permutation,
    count_destinations,
    replicate_tokens,
    sort_pairs,
    sum_rows,
    take_rows,
    transpose_blocks,
)


@pytest.mark.parametrize("sizes", [[[1, 0, 3], [2, 2, 0]], [[0, 0], [0, 0], [0, 0]], [[4], [1]]], ids=str)
def test_blocks_change_places_whole(sizes):
    sizes = torch.tensor(sizes)
    groups, numbers = sizes.shape
    rows = torch.arange(sizes.sum())
    blocks = rows.split(sizes.flatten().tolist())
    expected = [blocks[place * numbers + number] for number in range(numbers) for place in range(groups)]
    order = transpose_blocks(sizes, len(rows))
    assert order.token.tolist() == torch.cat(expected).tolist()
    there = take_rows(rows[:, None], order)
    assert torch.equal(take_rows(there, order.inverse()), rows[:, None])


@pytest.mark.parametrize("tokens", [1, 12, 1024, 2500])
def test_pairs_are_sorted_by_destination_in_the_order_of_tokens(tokens):
    torch.manual_seed(tokens)
    destinations = torch.stack(
        [torch.randperm(9)[:3] for _ in range(tokens)]
    )  # of 9, and three times nowhere
    destinations = torch.where(torch.rand(tokens, 3) < 0.2, 9, destinations)
    counts, pair, row = sort_pairs(destinations, 9)
    kept = counts.sum()
    assert counts.tolist() == destinations.flatten().bincount(minlength=10)[:9].tolist()
    assert torch.equal(pair[:kept], destinations.flatten().argsort(stable=True)[:kept])
    assert torch.equal(row.flatten()[pair[:kept]], torch.arange(kept))
    assert (row[destinations == 9] >= kept).all()


def copied(groups: torch.Tensor, count: int) -> tuple[list[int], Permutation]:
    sizes, before, has = (part[..., :count] for part in count_destinations(groups, count + 1))
    token, row = replicate_tokens(sizes, before, has)
    return sizes.tolist(), Permutation(token[: sizes.sum()], row, all_kept=False)


def test_a_token_is_copied_once_for_each_group_and_its_copies_are_summed():
    counts, order = copied(torch.tensor([[0, 2, 0], [3, 3, 3], [2, 1, 3], [0, 1, 2]]), 3)  # 3 is none
    assert counts == [2, 2, 3]
    x = torch.randn(4, 5, requires_grad=True)
    rows = take_rows(x, order)
    assert torch.equal(rows, x[[0, 3, 2, 3, 0, 2, 3]])
    wanted = torch.tensor([2.0, 0.0, 2.0, 3.0])[:, None]
    assert torch.equal(sum_rows(rows, order), x * wanted)
    rows.sum().backward()
    assert torch.equal(x.grad, wanted.expand(4, 5))
    counts, nowhere = copied(torch.full((4, 2), 3), 3)
    assert counts == [0, 0, 0]
    assert not sum_rows(take_rows(x, nowhere), nowhere).any()
