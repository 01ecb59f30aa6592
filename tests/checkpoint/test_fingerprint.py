"""The fingerprint of weights: the same in every layout, and another after a step."""

import torch

from megalith.checkpoint.fingerprint import VALUES, fingerprint, sample
from megalith.config import ParallelConfig
from megalith.parallel.gather import ALONE
from megalith.parallel.mesh import build_mesh
from megalith.parallel.shards import LocalShard

SHAPES = {"matrix": (37, 10), "experts": (4, 6, 5), "bias": (3,), "scale": (), "nothing": (0, 4)}


def whole() -> dict[str, LocalShard]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: LocalShard(torch.randn(shape, generator=generator), (0,) * len(shape), shape, owned=True)
        for name, shape in SHAPES.items()
    }


def cut(shard: LocalShard, parts: int, part: int, dim: int) -> LocalShard:
    values = shard.values.chunk(parts, dim)
    if part >= len(values):
        return LocalShard(shard.values.narrow(dim, 0, 0), shard.offset, shard.shape, owned=True)
    start = sum(value.shape[dim] for value in values[:part])
    offset = tuple(start if at == dim else 0 for at in range(len(shard.shape)))
    return LocalShard(values[part], offset, shard.shape, owned=True)


def found_in_three() -> str | None:
    world = build_mesh(ParallelConfig(), 3, "cpu").world
    shards = {}
    for number, (name, shard) in enumerate(whole().items()):
        copied = len(shard.shape) == 0  # held alike by all, owned by one
        own = LocalShard(shard.values, shard.offset, shard.shape, owned=world.rank == 0)
        shards[name] = own if copied else cut(shard, 3, world.rank, number % 2 if len(shard.shape) > 1 else 0)
    return fingerprint(shards, world)


def test_it_does_not_depend_on_the_layout(pool):
    assert pool.run(found_in_three, size=3) == [fingerprint(whole(), ALONE), None, None]


def test_a_small_change_of_one_tensor_changes_it():
    first = fingerprint(whole(), ALONE)
    moved = whole()
    moved["matrix"].values.add_(1e-6)
    assert fingerprint(moved, ALONE) != first == fingerprint(whole(), ALONE)


def test_values_are_taken_from_all_over_a_tensor():
    assert len(sample(whole()["matrix"])) == VALUES
    assert {len(sample(cut(whole()["matrix"], 37, row, 0))) for row in (0, 18, 36)} <= {
        VALUES // 37,
        VALUES // 37 + 1,
    }
    assert sample(whole()["scale"]) == {number: sample(whole()["scale"])[0] for number in range(VALUES)}
