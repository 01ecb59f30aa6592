"""Who writes what: every element once, whoever holds it, and the bytes evenly."""

import torch

from megalith.checkpoint.plan import divide, entries
from megalith.parallel.shards import Box


def plans(ranks):
    """Each rank's plan, from all ranks' boxes."""
    told = [entries(boxes) for boxes in ranks]
    return [divide(told, rank) for rank in range(len(ranks))]


def whole(*shape):
    return Box(torch.zeros(shape), (0,) * len(shape), shape, owned=True)


def rows(start, count, of):
    return Box(torch.zeros(count, 8), (start, 0), (of, 8), owned=True)


def test_copies_are_written_once_and_the_bytes_spread_evenly():
    boxes = {"model": {f"w{i}": whole(10 + i, 8) for i in range(40)}, "optimizer": {"step": whole()}}
    shares = [plan.share for plan in plans([boxes] * 4)]
    assert sorted(key for share in shares for key in share) == sorted(
        (part, name) for part in boxes for name in boxes[part]
    )
    loads = [sum(boxes[part][name].values.nbytes for part, name in share) for share in shares]
    assert max(loads) - min(loads) <= 4 * 50 * 8


def test_a_rank_that_has_shards_of_its_own_gets_fewer_copies():
    ranks = [
        {"model": {"big": rows(0, 100, 160), "copy a": whole(30, 8), "copy b": whole(30, 8)}},
        {"model": {"big": rows(100, 60, 160), "copy a": whole(30, 8), "copy b": whole(30, 8)}},
        {"model": {"big": rows(160, 0, 160)}},  # an uneven shard: nothing
    ]
    first, second, third = plans(ranks)
    assert first.share == [("model", "big")]
    assert second.share == [("model", "big"), ("model", "copy a"), ("model", "copy b")]
    assert third.share == []
    assert first.table == second.table == third.table
    assert first.table["model"]["big"].shape == [160, 8]
