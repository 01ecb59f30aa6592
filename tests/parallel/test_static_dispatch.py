"""Experts' rows in buffers as large as any routing needs, whatever stands behind the last row."""

from unittest import mock

import pytest
import torch
from parity.parity_cases import run_config

from megalith.config import RunConfig
from megalith.models.router import Router
from megalith.ops.grouped_gemm import GroupedGemm, RowGroups
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


CASES = [
    ("ep2", "moe dropping, dropout"),
    ("ep4-zero3", "moe recompute all"),
    ("tp2-ep2", "moe"),
    ("tp2-sp-ep2", "deepseek documents"),
    ("tp2-sp-etp2-ep2", "gpt-oss documents"),
    ("ep2-allgather", "gpt-oss documents"),
]


@pytest.mark.parametrize(("layout", "run"), CASES)
def test_what_stands_behind_the_rows_changes_nothing(pool, layout, run):
    config = run_config(run, layout, "", **SMALL, parallel=STATIC)
    ranks = pool.run(job, config, size=LAYOUTS[layout].processes)
    errors = compare(ranks, run_job(run_config(run, None, "", **SMALL)))
    assert errors.within(), errors


@pytest.mark.parametrize("layout", ["ep4-zero3", "ep2-allgather"])
def test_ranks_whose_experts_get_no_token_give_zero_gradients(pool, layout):
    config = run_config("moe", layout, "", **SMALL, parallel=STATIC)
    ranks = pool.run(job, config, True, size=LAYOUTS[layout].processes)
    assert compare(ranks, job(run_config("moe", None, "", **SMALL), True)).within()
    gradient = ranks[0].gradients["layers.0.mlp.experts.linear_fc1.weight"]
    assert gradient[:2].any() and not gradient[2:].any()
