"""Experts' rows in buffers as large as any routing needs, whatever stands behind the last row."""

from unittest import mock

import pytest
import torch
from default_cases import by_default
from parity.parity_cases import run_config
from torch import Tensor

from megalith.config import RunConfig
from megalith.models.moe import bounded_rows
from megalith.models.router import Router
from megalith.ops import compiled
from megalith.ops.activation import ACTIVATIONS, weighted_activation
from megalith.ops.grouped_gemm import GroupedGemm, RowGroups
from megalith.ops.permute import sum_rows
from megalith.parallel.expert.dispatch_buffer import replicate_rows, unpack_replicated
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import compare
from megalith.parity.job import Outcome, run_job

STATIC = {"moe_static_dispatch": True}
SMALL = {"model": {"num_layers": 2}, "train": {"train_iters": 2}}


def first_two(self, scores, numbers):
    return torch.arange(2, device=scores.device).expand(len(scores), 2).contiguous()


def job(config: RunConfig, to_the_first: bool = False) -> Outcome:
    """The job with NaNs wherever a grouped matmul on a GPU leaves what was in memory; or with all tokens going to
    experts 0 and 1 too."""
    by_rows = GroupedGemm._by_rows

    def with_garbage(self, rows, matrices, groups: RowGroups):
        y = by_rows(self, rows, matrices, groups)
        y[sum(groups.on_host) :] = float("nan")
        return y

    with mock.patch.object(GroupedGemm, "_by_rows", with_garbage):
        if not to_the_first:
            return run_job(config)
        with mock.patch.object(Router, "_choose", first_two):
            return run_job(config)


# By default each way that tokens travel: alone, with experts cut in two, gathered; ZeRO-3 is in the test after this.
CASES = [
    ("ep2", "moe dropping, dropout"),
    ("tp2-sp-etp2-ep2", "gpt-oss documents"),
    ("ep2-allgather", "deepseek documents"),
]
MORE = [
    ("ep4-zero3", "moe recompute all"),
    ("tp2-ep2", "moe"),
    ("tp2-sp-ep2", "deepseek documents"),
    ("ep2-allgather", "gpt-oss documents"),
]


@pytest.mark.parametrize(("layout", "run"), by_default(CASES + MORE, CASES[0]))
def test_what_stands_behind_the_rows_changes_nothing(pool, layout, run):
    config = run_config(run, layout, "", **SMALL, parallel=STATIC)
    ranks = pool.run(job, config, size=LAYOUTS[layout].processes)
    errors = compare(ranks, run_job(run_config(run, None, "", **SMALL)))
    assert errors.within(), errors


@pytest.mark.parametrize("layout", by_default(["ep4-zero3", "ep2-allgather"], "ep2-allgather"))
def test_ranks_whose_experts_get_no_token_give_zero_gradients(pool, layout):
    config = run_config("moe", layout, "", **SMALL, parallel=STATIC)
    ranks = pool.run(job, config, True, size=LAYOUTS[layout].processes)
    assert compare(ranks, job(run_config("moe", None, "", **SMALL), True)).within()
    gradient = ranks[0].gradients["layers.0.mlp.experts.linear_fc1.weight"]
    assert gradient[:2].any() and not gradient[2:].any()


def by_turns(x: Tensor, weights: Tensor, destinations: Tensor, fused: bool) -> Tensor:
    """Silu of gates times ups and weights, summed over the experts of two ranks, each with the tokens of both; NaNs
    stand behind the rows as a matmul may leave them."""
    tokens, topk = weights.shape
    packed, sums = replicate_rows(x, weights, 2, fused), []
    for rank in range(2):
        here = destinations - 4 * rank
        plan = bounded_rows(weights, torch.where((here < 0) | (here >= 4), 4, here), 4)
        end = RowGroups(plan.counts, padded=True).end
        rows, row_weights, order = unpack_replicated(packed, plan, end, x.shape[1], fused)
        assert len(rows) == len(row_weights) == 2 * tokens * topk
        rows = torch.where(torch.arange(len(rows))[:, None] < end, rows, float("nan"))
        rows = weighted_activation(rows, row_weights, ACTIVATIONS["silu"], True, fused, end=end)
        rows = torch.where(torch.arange(len(rows))[:, None] < end, rows, float("nan"))
        sums.append(sum_rows(rows, order, fused).unflatten(0, (2, tokens)))
    return torch.stack(sums).sum(0)


@pytest.mark.full
def test_compiled_rows_of_static_dispatch_are_those_of_eager_and_of_plain_indexing(
    quick_compile, monkeypatch
):
    monkeypatch.setattr(compiled, "_on_gpu", lambda x: True)
    generator = torch.Generator().manual_seed(0)
    for tokens in (30, 41):
        x = torch.randn(tokens, 16, generator=generator, requires_grad=True)
        weights = torch.randn(tokens, 3, generator=generator, requires_grad=True)
        destinations = torch.rand(2 * tokens, 9, generator=generator).argsort(1)[:, :3]  # 8: nowhere
        gate, up = x.unflatten(1, (-1, 2)).unbind(-1)
        kept = (destinations < 8).unflatten(0, (2, tokens))
        expected = (torch.nn.functional.silu(gate) * up) * (weights * kept).sum(2, keepdim=True)
        ways = [expected, by_turns(x, weights, destinations, False), by_turns(x, weights, destinations, True)]
        factors = torch.linspace(-1, 1, expected.numel()).view_as(expected)
        plain, *ours = ([y, *torch.autograd.grad((y * factors).sum(), (x, weights))] for y in ways)
        for results in ours:
            torch.testing.assert_close(results, plain)


@pytest.mark.full
def test_its_bits_in_bf16_are_those_of_exact_sizes(pool):
    exact, static = (
        pool.run(job, run_config("moe", "ep2", "", **SMALL | more), size=2)
        for more in (
            {"train": {"precision": "bf16", "train_iters": 2}, "parallel": each} for each in ({}, STATIC)
        )
    )
    assert exact[0].losses == static[0].losses and exact[0].gradients.keys() == static[0].gradients.keys()
    assert all(
        torch.equal(static[0].gradients[name], exact[0].gradients[name]) for name in exact[0].gradients
    )
