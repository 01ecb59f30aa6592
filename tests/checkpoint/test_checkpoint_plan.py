"""Who writes what: every element once, whoever holds it, and the bytes evenly."""

import torch

from megalith.checkpoint.plan import divide, entries
from megalith.comm.collectives import scatter_json
from megalith.config import ParallelConfig
from megalith.parallel.mesh import build_mesh
from megalith.parallel.shards import LocalShard


def plan(ranks):
    """The table and each rank's share, from all ranks' shards."""
    return divide([entries(shards) for shards in ranks])


def whole(*shape):
    return LocalShard(torch.zeros(shape), (0,) * len(shape), shape, owned=True)


def rows(start, count, of):
    return LocalShard(torch.zeros(count, 8), (start, 0), (of, 8), owned=True)


def test_copies_are_written_once_and_the_bytes_spread_evenly():
    shards = {"model": {f"w{i}": whole(10 + i, 8) for i in range(40)}, "optimizer": {"step": whole()}}
    _, shares = plan([shards] * 4)
    assert sorted(key for share in shares for key in share) == sorted(
        (part, name) for part in shards for name in shards[part]
    )
    loads = [sum(shards[part][name].values.nbytes for part, name in share) for share in shares]
    assert max(loads) - min(loads) <= 4 * 50 * 8


def test_a_rank_that_has_shards_of_its_own_gets_fewer_copies():
    ranks = [
        {"model": {"big": rows(0, 100, 160), "copy a": whole(30, 8), "copy b": whole(30, 8)}},
        {"model": {"big": rows(100, 60, 160), "copy a": whole(30, 8), "copy b": whole(30, 8)}},
        {"model": {"big": rows(160, 0, 160)}},  # an uneven shard: nothing
    ]
    table, (first, second, third) = plan(ranks)
    assert first == [("model", "big")]
    assert second == [("model", "big"), ("model", "copy a"), ("model", "copy b")]
    assert third == []
    assert table["model"]["big"].shape == [160, 8] and table["model"].keys() == ranks[0]["model"].keys()


def handed_out():
    world = build_mesh(ParallelConfig(), 3, "cpu").world
    return scatter_json(["ä", [["model", "w"]] * 5, []] if world.rank == 0 else [], world)


def test_each_rank_gets_its_own_value_whatever_their_lengths(pool):
    assert pool.run(handed_out, size=3) == ["ä", [["model", "w"]] * 5, []]
