"""Every collective gives the values and the gradients that its formula says, eagerly and compiled in one graph."""

from unittest import mock

import pytest
import torch
from default_cases import cases_that_run
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from megalith.comm import collectives as comm
from megalith.config import ParallelConfig
from megalith.local_shards import local, local_shape_and_offset
from megalith.parallel.mesh import build_mesh


def tensor_axis(size: int) -> comm.Axis:
    return build_mesh(ParallelConfig(tensor_model_parallel_size=size), size, "cpu").tp


def inputs(size: int) -> torch.Tensor:
    """[rank, 4, 6, 2]: what each rank starts from."""
    return torch.randn(size, 4, 6, 2, generator=torch.Generator().manual_seed(1))


def run_collectives(size: int, compiled: bool) -> dict[tuple[str, int | None], tuple[torch.Tensor, ...]]:
    """Of each case its result here, the gradient of what it was given and the weights of the result in the loss."""
    axis = tensor_axis(size)

    def forward(*arguments: torch.Tensor) -> list[torch.Tensor]:
        return [
            getattr(comm, name)(x * 2, axis, *([] if dim is None else [dim])).sin()
            for (name, dim), x in zip(CASES, arguments, strict=True)
        ]

    if compiled:
        forward = torch.compile(forward, fullgraph=True)
    xs = [inputs(size)[axis.rank].requires_grad_() for _ in CASES]
    ys = forward(*xs)
    weights = [torch.randn(y.shape, generator=torch.Generator().manual_seed(7 + axis.rank)) for y in ys]
    sum((y * weight).sum() for y, weight in zip(ys, weights)).backward()
    return {case: (y.detach(), x.grad, weight) for case, x, y, weight in zip(CASES, xs, ys, weights)}


# name: (what the ranks' inputs [rank, ...] become, whether every rank goes on alike)
FORMULAS = {
    "all_reduce": (lambda x, dim: x.sum(0, keepdim=True).expand_as(x), "alike"),
    "all_reduce_gradient": (lambda x, dim: x, "apart"),
    "all_gather": (lambda x, dim: torch.cat(x.unbind(), dim).expand(len(x), *[-1] * (x.ndim - 1)), "apart"),
    "all_gather_replicated": (
        lambda x, dim: torch.cat(x.unbind(), dim).expand(len(x), *[-1] * (x.ndim - 1)),
        "alike",
    ),
    "reduce_scatter": (lambda x, dim: torch.stack(x.sum(0).chunk(len(x), dim)), "apart"),
    "all_to_all": (
        lambda x, dim: x.unflatten(1, (len(x), -1)).transpose(0, 1).flatten(1, 2),
        "apart",
    ),
}
CASES = [
    ("all_reduce", None),
    ("all_reduce_gradient", None),
    ("all_gather", 0),
    ("all_gather", 1),
    ("all_gather_replicated", 2),
    ("reduce_scatter", 0),
    ("reduce_scatter", 1),
    ("all_to_all", None),
]


@pytest.fixture(scope="module")
def collectives(pool, request):
    """What each collective gives each of two ranks, eagerly and compiled: all of them in one graph."""
    ways = cases_that_run(request, (False, True), "compiled")
    return pool.run_cases(run_collectives, {compiled: (2, compiled) for compiled in ways}, size=2)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name, dim", CASES)
def test_values_and_gradients_equal_the_formula(collectives, name, dim, compiled):
    size = 2
    results = [rank[name, dim] for rank in collectives[compiled]]
    formula, going_on = FORMULAS[name]
    x = inputs(size).requires_grad_()
    expected = formula(x * 2, dim).sin()
    for rank, (y, _, _) in enumerate(results):
        torch.testing.assert_close(y, expected[rank])
    weights = torch.stack([weights for _, _, weights in results])
    if name == "all_reduce_gradient":  # one x, used on every rank
        (gradient,) = torch.autograd.grad((expected * weights).sum(), x)
        grads = [gradient.sum(0)] * size
    elif going_on == "alike":  # each rank's gradient is of its own result alone
        grads = []
        for rank in range(size):
            (gradient,) = torch.autograd.grad((expected[rank] * weights[rank]).sum(), x, retain_graph=True)
            grads.append(gradient[rank])
    else:
        (gradient,) = torch.autograd.grad((expected * weights).sum(), x)
        grads = list(gradient)
    for (_, gradient, _), wanted in zip(results, grads):
        torch.testing.assert_close(gradient, wanted)


def test_an_axis_of_one_passes_tensors_through():
    x = torch.ones(3)
    for name in FORMULAS:
        assert getattr(comm, name)(x, comm.Axis()) is x
    assert comm.all_reduce_no_grad(x, comm.Axis()) is x


def largest(size: int) -> torch.Tensor:
    return comm.all_reduce_no_grad(inputs(size)[tensor_axis(size).rank], tensor_axis(size), "max")


def test_the_maximum_over_the_axis(pool):
    for result in pool.run(largest, 2, size=2):
        torch.testing.assert_close(result, inputs(2).amax(0))


def parts_by_gloo(x: torch.Tensor, axis: comm.Axis) -> comm.PendingReduceScatter:
    """What a reduce-scatter by copy engines gives: the others' parts in the order of ranks behind this one."""
    came = comm.all_to_all(x, axis).chunk(axis.size)
    others = [came[(axis.rank + step) % axis.size] for step in range(1, axis.size)]
    return comm.PendingReduceScatter(came[axis.rank], torch.stack(others))


def sum_in_shares(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """bf16 of this rank, what all_reduce gives, the gradient that all_reduce_gradient gives, and how many of both
    sums were made in shares."""
    axis = tensor_axis(3)
    torch.manual_seed(axis.rank)
    x = torch.randn(shape).bfloat16().requires_grad_()
    with (
        mock.patch.object(comm.Axis, "uses_copy_engine", lambda axis, x: True),
        mock.patch.object(comm, "begin_reduce_scatter", side_effect=parts_by_gloo) as shares,
        mock.patch.object(comm, "begin_all_gather", gathered_by_gloo),
    ):
        y = comm.all_reduce(x.transpose(0, 1), axis).transpose(0, 1)
        comm.all_reduce_gradient(x, axis).backward(x.detach())
    return x.detach(), y.detach(), x.grad, shares.call_count


def gathered_by_gloo(x: torch.Tensor, axis: comm.Axis) -> torch.Tensor:
    return torch.ops._c10d_functional.all_gather_into_tensor(x, axis.size, axis.name)


@pytest.mark.parametrize("shape, in_shares", [((4, 9, 2), 2), ((5, 7), 0)], ids=["divides", "does not"])
def test_an_all_reduce_by_copy_engines_is_a_sum_in_fp32_rounded_once(pool, shape, in_shares):
    """Where ranks cannot have equal shares of it, it goes as ever."""
    arguments, sums, gradients, counts = zip(*pool.run(sum_in_shares, shape, size=3))
    assert set(counts) == {in_shares}
    exact = sum(x.double() for x in arguments)
    for everyones in (sums, gradients):
        assert all(torch.equal(outputs, everyones[0]) for outputs in everyones)
        torch.testing.assert_close(everyones[0].double(), exact, rtol=2**-7, atol=2**-6)
        assert not in_shares or torch.equal(everyones[0], exact.bfloat16())


def place_of_rows(rows: int) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """First value and length of this rank's part of 0, 1, … under tensor 2 × FSDP 4; local_shape_and_offset."""
    parallel = ParallelConfig(tensor_model_parallel_size=2, data_parallel_sharding_strategy="optim")
    mesh = build_mesh(parallel, 8, "cpu")
    module = nn.Module()
    placed = distribute_tensor(torch.arange(float(rows)), mesh.tp.mesh, [Shard(0)], src_data_rank=None)
    module.rows = nn.Parameter(placed)
    fully_shard(module, mesh=mesh.fsdp)
    here = local(module.rows)
    return int(here[0]), len(here), *local_shape_and_offset(module.rows)


def test_place_of_rows_that_tensor_and_data_parallelism_cut_unevenly(pool_of_eight):
    for ranks in pool_of_eight.run_cases(place_of_rows, {rows: (rows,) for rows in (250, 70)}).values():
        for first, length, shape, place in ranks:
            assert ((length,), (first,)) == (shape, place)
