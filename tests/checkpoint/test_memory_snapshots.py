"""Snapshots in host memory: which one all ranks can restore, from whose memory, and what damage leaves."""

from types import SimpleNamespace

import pytest
import torch

from megalith.checkpoint import memory_snapshots
from megalith.checkpoint.memory_snapshots import MemorySnapshots, Snapshot, fill
from megalith.checkpoint.staging import Staging
from megalith.comm.collectives import Axis, gather_json
from megalith.errors import CheckpointError
from megalith.optim.moments import Moment
from megalith.parallel.shards import LocalShard


def shard(values) -> LocalShard:
    return LocalShard(values, (0,) * len(values.shape), tuple(values.shape), owned=True)


def state(rank: int, step: int) -> dict:
    """A state that differs per rank and step, in size too."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    parameter = torch.zeros(8, 16 + rank)
    parameter.copy_(torch.randn(parameter.shape, generator=generator))
    moment = Moment.zeros(torch.zeros(16, 8), "fp8", 8, signed=True)
    moment.copy_(torch.randn(16, 8, generator=generator))
    return {
        "optimizer": {"optim.w.exp_avg": shard(moment), "optim.w.step": shard(torch.tensor(float(step)))},
        "model": {"w": shard(parameter.t()), "bias": shard(torch.randn(3, generator=generator))},
    }


def tensors(shards: dict) -> list:
    return [values.clone() for _, _, values in memory_snapshots._named_tensors(shards)]


def blank(shards: dict) -> None:
    for _, _, values in memory_snapshots._named_tensors(shards):
        values.zero_()


def world_of(size: int) -> Axis:
    group = torch.distributed.group.WORLD
    return Axis(size, torch.distributed.get_rank(), group, group.group_name)


def take(snapshots: MemorySnapshots, rank: int, step: int) -> None:
    shards = state(rank, step)
    snapshots.take({"step": step}, shards)
    if step % 2:
        blank(shards)  # the copy is complete on a CPU when `take` returns


def restored(snapshots: MemorySnapshots, world: Axis) -> int | None:
    """Restore the newest snapshot into a blank state; return its step after checking each value."""
    while (serial := snapshots.find(world)) is not None:
        if (snapshot := snapshots.fetch(serial, world)) is None:
            continue
        step = snapshot.description["step"]
        shards, expected = state(world.rank, step), tensors(state(world.rank, step))
        blank(shards)
        fill(snapshot, shards)
        assert all(map(torch.equal, tensors(shards), expected))
        return step
    return None


def lost_ranks(cases: list) -> list:
    """For each case: take some snapshots, lose the memory of some ranks, restore. Returns the restored steps."""
    results = []
    for ranks_per_host, steps, losses in cases:
        world = world_of(4)
        snapshots = MemorySnapshots()
        snapshots._staging = [Staging(slab=256), Staging(slab=256)]
        snapshots.connect(world, ranks_per_host)
        for step in range(1, steps + 1):
            take(snapshots, world.rank, step)
        snapshots.wait()
        assert snapshots.results()[-1].error == ""
        for lost in losses:
            if world.rank in lost:
                snapshots = MemorySnapshots()
            snapshots.connect(world, ranks_per_host)
            step = restored(snapshots, world)
            if step is not None:
                take(snapshots, world.rank, step)  # as after a restart
                snapshots.wait()
        results.append(step)
        assert len({*gather_json(step, world)}) == 1
    return results


CASES = [
    (4, 3, [[]], 3),
    (4, 3, [[0]], 3),
    (4, 3, [[3]], 3),
    (4, 3, [[0, 2]], 3),  # each of them has a partner that lives
    (4, 3, [[1, 2]], None),  # rank 1's copy was rank 2's
    (4, 3, [[1], [2]], 3),  # one after the other
    (4, 3, [[0], [0], [0]], 3),
    (2, 2, [[2, 3]], 2),  # a host of two ranks: the partners are on the other one
    (2, 2, [[1, 2]], 2),
    (2, 2, [[0, 2]], None),
    (4, 0, [[1]], None),
]


def test_the_newest_snapshot_is_restored_from_what_is_left_of_the_ranks_memory(pool):
    cases = [case[:3] for case in CASES if case[1]]
    expected = [case[3] for case in CASES if case[1]]
    for results in pool.run(lost_ranks, cases, size=4):
        assert results == expected


def interrupted(point: str) -> tuple:
    """Take two snapshots; the second one ends at `point` on rank 1. Returns the restored step and what happened."""
    world = world_of(2)
    snapshots = MemorySnapshots(
        is_aborted=lambda: point == "aborted" and world.rank == 1 and snapshots._serial == 2
    )
    snapshots.connect(world, 2)
    take(snapshots, world.rank, 1)
    snapshots.wait()
    error = ""
    if point == "memory" and world.rank == 1:
        snapshots._copy = lambda *_: torch.empty(2**62)
    if point == "damaged in transit" and world.rank == 1:
        exchange = memory_snapshots._exchange_buffers

        def damage(sent, received, *rest):
            exchange(sent, received, *rest)
            received[0][5] ^= 1

        memory_snapshots._exchange_buffers = damage
    take(snapshots, world.rank, 2)
    snapshots.wait()
    error = snapshots.results()[-1].error
    if point == "damaged in transit":
        memory_snapshots._exchange_buffers = exchange if world.rank else memory_snapshots._exchange_buffers
    if point == "damaged in memory" and world.rank == 1:
        snapshots._local[2].buffers[0][7] ^= 1
    return restored(snapshots, world), error, sorted(snapshots._local)


def test_a_snapshot_that_is_not_complete_and_intact_on_all_ranks_is_not_restored(pool):
    points = ["aborted", "memory", "damaged in transit", "damaged in memory"]
    words = ["rank 1", "rank 1", "rank 1", ""]
    results = pool.run_cases(interrupted, {point: (point,) for point in points}, size=2)
    for point, word in zip(points, words):
        for step, error, kept in results[point]:
            assert step == 1 and word in error and bool(error) == bool(word) and kept == [1], (point, error)


def test_a_snapshot_of_another_state_is_rejected():
    buffers = [torch.zeros(12, dtype=torch.uint8)]
    snapshot = Snapshot(1, {"tensors": [["model", "w", "torch.float32", [3]]]}, buffers)
    fill(snapshot, {"model": {"w": shard(torch.ones(3))}})
    with pytest.raises(CheckpointError, match="does not fit"):
        fill(snapshot, {"model": {"w": shard(torch.ones(4))}})


def test_partners_are_on_another_host_if_there_is_one(monkeypatch):
    monkeypatch.setattr(memory_snapshots.dist, "new_group", lambda **_: SimpleNamespace())
    for size, per_host, stride in ((4, 4, 1), (8, 4, 4), (8, 1, 1), (6, 3, 3)):
        snapshots = MemorySnapshots()
        snapshots.connect(Axis(size, 0), per_host)
        assert snapshots._stride == stride
