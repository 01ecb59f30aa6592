"""Snapshots in host memory: which one all ranks can restore, from whose memory, and what damage leaves."""

from types import SimpleNamespace

import pytest
import torch

from megalith.checkpoint import memory_snapshots
from megalith.checkpoint.memory_resharding import placed_tensors
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
    return [placed.values.clone() for placed in placed_tensors(shards)]


def blank(shards: dict) -> None:
    for placed in placed_tensors(shards):
        placed.values.zero_()


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
        if (snapshot := snapshots.fetch(serial, world, state(world.rank, 0))) is None:
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


def global_state(step: int) -> tuple:
    """Return a matrix, its moment in 8 bits and a count, as one process holds them."""
    generator = torch.Generator().manual_seed(step)
    moment = Moment.zeros(torch.zeros(10, 64), "fp8", 8, signed=True)
    moment.copy_(torch.randn(10, 64, generator=generator))
    return torch.randn(10, 64, generator=generator), moment, torch.tensor(float(step))


def sharded_state(rank: int, size: int, step: int, columns: int) -> dict:
    """A rank's shards: uneven rows over the ranks, of one of `columns` groups of columns; a replicated count."""
    matrix, moment, count = global_state(step)
    rows, width = -(-10 // (size // columns)), 64 // columns
    row, column = min(10, rank // columns * rows), rank % columns * width
    index = slice(row, min(10, row + rows)), slice(column, column + width)
    part = Moment(moment.codes[index], moment.scales[index[0], column // 8 : (column + width) // 8], True)
    place = dict(offset=(row, column), shape=(10, 64), owned=True)
    return {
        "optimizer": {"optim.w.exp_avg": LocalShard(part, **place), "optim.w.step": shard(count)},
        "model": {"w": LocalShard(matrix[index].clone(), **place)},
    }


def resized(before: int, after: int, columns: int, lost: list[int], damage: bool = False) -> int | None:
    """Take snapshots with `before` ranks, lose the memory of some, and restore with `after`. Returns the step."""
    rank, snapshots, step = torch.distributed.get_rank(), MemorySnapshots(), None
    groups = {size: torch.distributed.new_group(range(size)) for size in (before, after)}

    def connect(size: int) -> Axis:
        world = Axis(size, rank, groups[size])
        snapshots._world, snapshots._stride = world, 2 if size > 2 else 1
        return world

    if rank < before:
        connect(before)
        for number in (1, 2):
            shards = sharded_state(rank, before, number, columns)
            snapshots.take({"step": number, "of": rank}, shards)
            snapshots.wait()
    if rank in lost:
        snapshots = MemorySnapshots()
    if damage and rank == 1:
        snapshots._local[2].buffers[0][3] ^= 1
    if rank >= after:
        return "lost"
    world = connect(after)
    shards = sharded_state(rank, after, 3, columns)
    while (serial := snapshots.find(world)) is not None:
        snapshot = snapshots.fetch(serial, world, shards)
        if snapshot is not None:
            step = snapshot.description["step"]
            fill(snapshot, shards)
            expected = placed_tensors(sharded_state(rank, after, step, columns))
            values = [placed.values for placed in placed_tensors(shards)]
            assert all(map(torch.equal, values, [placed.values for placed in expected]))
            assert snapshot.description["of"] == 0
            break
    snapshots.take({"step": 4, "of": rank}, shards)
    snapshots.wait()
    assert snapshots.find(world) == snapshots._serial and snapshots.results()[-1].error == ""
    return step


def test_a_job_of_another_size_restores_the_same_values(pool):
    cases = {
        "half of the ranks are lost": (4, 2, 1, [2, 3]),
        "in two groups of columns": (4, 2, 2, [2, 3]),
        "one rank is left": (2, 1, 1, [1]),
        "two ranks have joined": (2, 4, 1, [2, 3]),
        "and one has been replaced": (2, 4, 2, [1, 2, 3]),
        "three ranks are left": (4, 3, 1, [3]),
        "from one to four": (1, 4, 1, [1, 2, 3]),
        "a copy is damaged": (4, 2, 1, [2, 3], True),
        "partners are lost": (4, 2, 1, [0, 2, 3]),
    }
    expected = {"a copy is damaged": 1, "partners are lost": None}
    for case, results in pool.run_cases(resized, cases, size=4).items():
        assert {*results} - {"lost"} == {expected.get(case, 2)}, case


def test_a_snapshot_of_another_state_is_rejected():
    buffers = [torch.zeros(12, dtype=torch.uint8)]
    snapshot = Snapshot(1, {"tensors": [["model", "w", "torch.float32", [3], [0], [3]]]}, buffers)
    fill(snapshot, {"model": {"w": shard(torch.ones(3))}})
    with pytest.raises(CheckpointError, match="does not match the run's state"):
        fill(snapshot, {"model": {"w": shard(torch.ones(4))}})


def test_partners_are_on_another_host_if_there_is_one(monkeypatch):
    monkeypatch.setattr(memory_snapshots.dist, "new_group", lambda **_: SimpleNamespace())
    for size, per_host, stride in ((4, 4, 1), (8, 4, 4), (8, 1, 1), (6, 3, 3)):
        snapshots = MemorySnapshots()
        snapshots.connect(Axis(size, 0), per_host)
        assert snapshots._stride == stride
