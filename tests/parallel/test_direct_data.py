"""Gradients summed by copy engines, played through over gloo: the memory that ranks share is sent when they meet."""

from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import data_job
import pytest
import torch
import torch.distributed as dist
from parity.parity_cases import run_config
from torch.distributed.distributed_c10d import _resolve_process_group

from megalith.comm import copy_engine as direct
from megalith.config import RunConfig
from megalith.errors import TrainingError
from megalith.parallel.data import replicas as replicated
from megalith.parallel.mesh import build_mesh
from megalith.parallel.overlap import copy_engine_gradients as direct_data
from megalith.parallel.overlap.copy_engine_gradients import CopyEngineAllReduce, CopyEngineReduceScatter
from megalith.parity import job
from megalith.parity.differences import compare

TURN = ["begin", "synchronize", "end"]
SUM = ["begin", "synchronize", "synchronize", "end"]  # of replicas


def memory_of(size: int) -> int:
    """The bytes of a slot of `size`, with its flags."""
    return -(-size // direct.FLAG) * direct.FLAG + 2 * direct.FLAG * direct.MOST_RANKS


class Memory:
    """What torch's symmetric memory is, a rank's view: all give and meet, then all fetch and end their turn."""

    made: list[int] = []
    """Bytes of each."""

    def __init__(self, own: torch.Tensor, group: str):
        self._group = _resolve_process_group(group)
        self.rank, self.world_size = self._group.rank(), self._group.size()
        self._all = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.world_size)]
        self.made.append(own.nbytes)

    def get_buffer(self, rank: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return self._all[rank].view(dtype)[: shape.numel()].view(shape)

    def send(self) -> None:
        come = [torch.empty_like(memory) for memory in self._all]
        dist.all_gather(come, self._all[self.rank], group=self._group)
        for rank in set(range(self.world_size)) - {self.rank}:
            self._all[rank].copy_(come[rank])

    def spoil(self) -> None:
        for memory in self._all:
            memory.view(torch.float32).fill_(float("nan"))


@contextmanager
def shared_memory():
    """Memory that ranks share, and a record of what becomes of slots: "begin", "synchronize" and "end" of each turn."""
    asked: list[str] = []
    Memory.made.clear()
    direct.slots.cache_clear()

    def step(name: str, effect: str | None):
        def call(slot: direct.Slot, stream: object) -> None:
            asked.append(name)
            if effect is not None:
                getattr(slot._handle, effect)()

        return call

    steps = {
        name: step(name, effect)
        for name, effect in (("begin", None), ("synchronize", "send"), ("end", "spoil"))
    }
    with ExitStack() as patches:
        patches.enter_context(
            mock.patch.multiple(
                torch.cuda,
                current_device=mock.Mock(return_value=0),
                current_stream=mock.Mock(),
                synchronize=mock.Mock(),
                Event=mock.Mock(),
                stream=lambda stream: nullcontext(),
            )
        )
        patches.enter_context(mock.patch.object(direct_data, "_stream"))
        patches.enter_context(mock.patch.object(replicated, "LEAST_BY_COPY_ENGINE", 0))
        patches.enter_context(mock.patch.multiple(direct.Slot, **steps))
        patches.enter_context(mock.patch.object(direct, "Flags"))
        patches.enter_context(
            mock.patch.multiple(
                direct.symmetric,
                empty=lambda size, dtype, device: torch.empty(size, dtype=dtype),
                rendezvous=Memory,
            )
        )
        yield asked
    direct.slots.cache_clear()


def by_copy_engines(*args, **kwargs):
    mesh = build_mesh(*args, **kwargs)
    return replace(mesh, dp=replace(mesh.dp, direct=True))


def both_ways(module, function, argument) -> tuple:
    """What came of the function by copy engines and by gloo, and how many reductions went by copy engines. The mesh is
    made by the module's build_mesh."""
    with shared_memory() as asked, mock.patch.object(module, "build_mesh", by_copy_engines):
        found = function(argument)
    reductions = asked.count("begin")
    assert asked in (TURN * reductions, SUM * reductions)
    return found, function(argument), reductions


def small_run(small: data_job.Job) -> tuple[data_job.Outcome, data_job.Outcome, int]:
    return both_ways(data_job, data_job.train, small)


TWO_COPIES = {"num_distributed_optimizer_instances": 2}


@pytest.mark.parametrize(
    ("ranks", "strategy", "layout", "reductions"),
    # 2 layers; a backward pass for its gradients alone and those of 2 steps; each has 2 micro-batches
    [
        (2, "no_shard", {}, 2 * 3),
        (2, "optim", {}, 2 * 3),
        (2, "optim_grads", {}, 2 * 3 * 2),
        (2, "optim_grads_params", {}, 2 * 3 * 2),
        (4, "no_shard", {"tensor_model_parallel_size": 2}, 2 * 3),
        (4, "optim_grads", TWO_COPIES, 2 * 3 * 2),
        (4, "optim", TWO_COPIES | {"context_parallel_size": 2}, 2 * 3),
        (2, "optim", TWO_COPIES, 0),  # a shard is all
    ],
    ids=[
        "no_shard",
        "optim",
        "optim_grads",
        "optim_grads_params",
        "no_shard over tensor",
        "hybrid",
        "over context",
        "copies alone",
    ],
)
def test_over_two_ranks_a_run_is_the_same_to_the_bit(pool, ranks, strategy, layout, reductions):
    small = data_job.Job(data_job.GPT2, steps=2, samples=2 * ranks)
    small = small.with_parallel(data_parallel_sharding_strategy=strategy, **layout)
    engines, plain, counts = zip(*pool.run(small_run, small, size=ranks))
    assert set(counts) == {reductions}
    assert [(run.losses, run.norms) for run in engines] == [(run.losses, run.norms) for run in plain]
    for kind in ("gradients", "parameters"):
        found, right = (data_job.assemble([getattr(run, kind) for run in runs]) for runs in (engines, plain))
        assert found.keys() == right.keys() and right
        assert not [name for name in right if not torch.equal(found[name], right[name])]


def run_with_experts(config: RunConfig) -> tuple[job.Outcome, job.Outcome, int]:
    return both_ways(job, job.run_job, config)


@pytest.mark.parametrize("layout", ["ep2-dp4", "ep2-dp4-zero1"])
def test_experts_and_layers_over_other_ranks_and_in_another_order_of_sums(pool, layout):
    small = {"model": {"num_layers": 1}, "train": {"train_iters": 2}}
    ranks = pool.run(run_with_experts, run_config("moe", layout, "", **small))
    assert {count for _, _, count in ranks} == {2 * 3}  # experts and layer
    result = compare([found for found, _, _ in ranks], ranks[0][1])
    assert result.within(), result


def reduced(lengths: list[int], at_once: int) -> list[bool]:
    """Whether each reduction, one after the other over the same memory, is to the bit the sum in the ranks' order."""
    group, found = dist.group.WORLD, []
    size, rank = group.size(), group.rank()
    reduce_scatter = CopyEngineReduceScatter(group)
    with shared_memory() as asked, mock.patch.object(direct_data, "FETCHED_AT_ONCE", at_once):
        for length in lengths:
            torch.manual_seed(rank)
            mine = torch.randn(size * length)
            given = reduce_scatter.allocate((size * length,), dtype=torch.float32, device=mine.device)
            given.copy_(mine)
            total = reduce_scatter.allocate((length,), dtype=torch.float32, device=mine.device)
            reduce_scatter(output_tensor=total, input_tensor=given, group=group, op=dist.ReduceOp.SUM)
            everyones = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(everyones, mine)
            expected = sum(whole.chunk(size)[rank] for whole in everyones)
            found.append(torch.equal(total, expected) and bool(given.isnan().all()))
        assert asked == TURN * len(lengths)
        assert Memory.made == [memory_of(4 * size * length) for length in (lengths[0], max(lengths))]
    return found


@pytest.mark.parametrize("at_once", [2**28, 3 * 4 * 100], ids=["in one piece", "in pieces"])
def test_parts_are_added_in_the_order_of_ranks_in_memory_that_is_used_again(pool, at_once):
    lengths = [250, 100, 400, 250]
    assert pool.run(reduced, lengths, at_once) == [[True] * len(lengths)] * 4


def summed_in_place(shapes: list[tuple[int, ...]], at_once: int) -> list[float]:
    """The largest differences of tensors of these shapes, summed in place, to their sums in float64."""
    group = dist.group.WORLD
    torch.manual_seed(group.rank())
    mine = [torch.randn(shape) for shape in shapes]
    found = [x.clone() for x in mine]
    with shared_memory() as asked, mock.patch.object(direct_data, "FETCHED_AT_ONCE", at_once):
        CopyEngineAllReduce(found, group).wait()
        assert asked == SUM
    exact = [x.double() for x in mine]
    for x in exact:
        dist.all_reduce(x)
    return [(a - b).abs().max().item() for a, b in zip(exact, found, strict=True)]


@pytest.mark.parametrize("shapes", [[(7, 3), (5,)], [(250, 4), (3,), (1,)]], ids=["26", "1,004"])
@pytest.mark.parametrize("at_once", [2**28, 3 * 4 * 100], ids=["in one piece", "in pieces"])
def test_copies_whose_parts_have_other_lengths_are_summed_in_place(pool, shapes, at_once):
    for differences in pool.run(summed_in_place, shapes, at_once):
        assert max(differences) < 1e-6


def told(calls: str, op: dist.ReduceOp.RedOpType) -> str:
    """What is said when FSDP2 asks for memory and the reduction in this order: i input, o output."""
    device = torch.device("cpu")
    with shared_memory():
        reduce_scatter = CopyEngineReduceScatter(dist.group.WORLD)
        lengths = {"i": 8, "o": 4}
        memory = {
            call: reduce_scatter.allocate((lengths[call],), dtype=torch.float32, device=device)
            for call in calls
        }
        for call in "io":
            memory.setdefault(call, torch.empty(lengths[call]))
        try:
            reduce_scatter(memory["o"], memory["i"], dist.group.WORLD, op)
        except TrainingError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("calls", "op"),
    [("oi", dist.ReduceOp.SUM), ("o", dist.ReduceOp.SUM), ("", dist.ReduceOp.SUM), ("io", dist.ReduceOp.AVG)],
    ids=["output first", "output alone", "nothing", "a mean"],
)
def test_another_way_of_asking_is_told(pool, calls, op):
    for said in pool.run(told, calls, op, size=2):
        assert "asks for a reduce-scatter of gradients in another way" in said
        assert "leave dp out of parallel.symmetric_memory_groups" in said
