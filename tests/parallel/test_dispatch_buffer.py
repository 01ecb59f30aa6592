"""Tokens that travel with their choices: what arrives, in which order, and the gradients, against plain indexing."""

import pytest
import torch
from torch import Tensor

from megalith.comm.collectives import Axis, begin_all_to_all, end_all_to_all
from megalith.config import ParallelConfig
from megalith.ops.permute import sum_rows
from megalith.parallel.expert.dispatch_buffer import pack, plan_dispatch, unpack
from megalith.parallel.mesh import build_mesh

EXPERTS, TOPK, HIDDEN = 6, 3, 8


def choices(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Weights and experts of tokens, some of them nowhere."""
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :TOPK]
    nowhere = torch.rand(tokens, TOPK, generator=generator) < 0.2
    return torch.randn(tokens, TOPK, generator=generator), torch.where(nowhere, EXPERTS, experts)


def there_and_back(x: Tensor, weights: Tensor, destinations: Tensor, axis: Axis, fused: bool = False):
    """Each row as it was unpacked, its weight, and the sums of weight · row² · (number of its expert + 1)."""
    here = EXPERTS // axis.size
    plan = plan_dispatch(weights, destinations, axis, here)
    values = plan.sizes.tolist()
    there, back, counts = values[: axis.size], values[axis.size : -here], values[-here:]
    assert counts == plan.counts.tolist()
    packed, order = pack(x, plan, sum(there), fused)
    came = end_all_to_all(begin_all_to_all(packed, axis, there, back))
    rows, row_weights, arranged = unpack(came, plan, sum(counts), fused)
    factors = torch.arange(axis.rank * here, axis.rank * here + here).repeat_interleave(plan.counts) + 1
    y = sum_rows((row_weights * factors[:, None]).to(x.dtype) * rows.square(), arranged, fused)
    y = end_all_to_all(begin_all_to_all(y, axis, back, there))
    return rows, row_weights, sum_rows(y, order, fused)


def expected(x: Tensor, weights: Tensor, destinations: Tensor) -> Tensor:
    factors = torch.where(destinations == EXPERTS, 0, destinations + 1) * weights
    return (factors[..., None].to(x.dtype) * x[:, None].square()).sum(1)


def inputs(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    weights, destinations = choices(tokens, seed)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed + 100), dtype=torch.float64)
    return x.requires_grad_(), weights.requires_grad_(), destinations


def gradients(y: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), (x, weights))


def outcome(tokens: list[int], nowhere: bool) -> tuple:
    """This rank's part of a job of two, what is expected of it, and the rows that came."""
    axis = build_mesh(ParallelConfig(tensor_model_parallel_size=2), 2, "cpu").tp
    x, weights, destinations = inputs(tokens[axis.rank], axis.rank)
    if nowhere:
        destinations = torch.full_like(destinations, EXPERTS)
    outputs = []
    for way in (there_and_back(x, weights, destinations, axis)[-1], expected(x, weights, destinations)):
        outputs.append([way.detach(), *gradients(way, x, weights)])
    rows, row_weights, _ = there_and_back(x.detach().bfloat16(), weights, destinations, axis)
    return outputs, rows.detach(), row_weights.detach()


@pytest.mark.parametrize("tokens, nowhere", [([40, 40], False), ([1, 30], False), ([7, 7], True)], ids=str)
def test_two_ranks_give_the_sums_and_gradients_of_plain_indexing_in_fp64(pool, tokens, nowhere):
    ranks = pool.run(outcome, tokens, nowhere, size=2)
    for (ours, theirs), _, _ in ranks:
        for outputs, exact in zip(ours, theirs):
            torch.testing.assert_close(outputs, exact, rtol=1e-6, atol=1e-6)  # the weights' are fp32


def test_rows_arrive_to_the_bit_by_expert_and_then_by_rank_and_token(pool):
    tokens = [40, 25]
    arguments = [inputs(count, rank) for rank, count in enumerate(tokens)]
    x, weights, destinations = (torch.cat([part[i].detach() for part in arguments]) for i in range(3))
    for rank, (_, rows, row_weights) in enumerate(pool.run(outcome, tokens, False, size=2)):
        pairs = torch.cat(
            [(destinations.flatten() == expert).nonzero() for expert in range(rank * 3, rank * 3 + 3)]
        )
        pairs = pairs.flatten()
        assert torch.equal(rows, x.bfloat16()[pairs // TOPK])
        assert torch.equal(row_weights.flatten(), weights.flatten()[pairs])


@pytest.mark.full
def test_compiled_dispatch_rows_equal_eager_ones(quick_compile, monkeypatch):
    from megalith.ops import compiled

    monkeypatch.setattr(compiled, "_on_gpu", lambda x: True)
    for tokens in (30, 41):
        x, weights, destinations = inputs(tokens, tokens)
        x = x.detach().bfloat16().requires_grad_()
        results = []
        for fused in (False, True):
            rows, row_weights, y = there_and_back(x, weights, destinations, Axis(), fused)
            results.append([rows, row_weights, y, *gradients(y, x, weights)])
        for plain, ours in zip(*results):
            torch.testing.assert_close(ours, plain)
