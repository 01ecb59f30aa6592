"""Layouts in other precisions and compiled: the same steps skipped, numbers as near as the precision allows."""

import functools
import math
from unittest import mock

import pytest
import torch
from parity_cases import layers, run_config

from megalith.config import RunConfig
from megalith.parallel.parallel_model import ParallelModel
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import compare, relative_error
from megalith.parity.job import Outcome, run_job

RUN = "gpt2 untied, documents, dropout"
OVERFLOWING = 2  # the pass in which the last rank finds an infinity


def in_precision(precision: str, layout: str | None, num_layers: int, run: str = RUN) -> RunConfig:
    return run_config(
        run,
        layout,
        "",
        model={"num_layers": num_layers},
        train={"precision": precision, "train_iters": 7 if precision == "fp16" else 3},
        optim={"initial_loss_scale": 2.0**14, "hysteresis": 1, "loss_scale_window": 2},
    )


def run_overflowing_job(config: RunConfig) -> Outcome:
    """The job, with one gradient of one rank overflowing once."""
    backward, passes = ParallelModel.backward, iter(range(1, 100))

    def overflow(self, micro_batches, of=None, *, loss_scale):
        loss = backward(self, micro_batches, of, loss_scale=loss_scale)
        world, parameters = self.mesh.world, self.parameters
        if next(passes) == OVERFLOWING and world.rank == world.size - 1:
            owned = [
                plain for name, plain in parameters.named if parameters.shards[name].owned and plain.numel()
            ]
            owned[0].grad.flatten()[0] = math.inf
        return loss

    with mock.patch.object(ParallelModel, "backward", overflow):
        return run_job(config)


@functools.cache
def alone(precision: str, num_layers: int) -> Outcome:
    return (run_overflowing_job if precision == "fp16" else run_job)(
        in_precision(precision, None, num_layers)
    )


def by_default(*layouts: str, more: tuple[str, ...]) -> list:
    return [*layouts, *(pytest.param(layout, marks=pytest.mark.full) for layout in more)]


@pytest.mark.parametrize(
    "layout", by_default("pp2-dp2-zero3", more=("tp2-sp-dp2-zero1", "cp2-dp2-zero2", "tp2-pp2"))
)
def test_fp16_ranks_skip_together_and_share_a_loss_scale(pool, layout):
    one = alone("fp16", layers(layout))
    assert sum(one.skipped) == 1 and len(set(one.loss_scales)) > 2
    for rank in pool.run(run_overflowing_job, in_precision("fp16", layout, layers(layout))):
        assert rank.skipped == one.skipped
        assert rank.loss_scales == one.loss_scales
        assert not rank.unequal_copies
        assert relative_error(rank.losses, one.losses) < 2e-3


@pytest.mark.parametrize("layout", by_default("tp2-sp-pp2", more=("dp4-zero2", "cp2-dp2-zero3")))
def test_bf16_follows_one_process_in_bf16(pool, layout):
    one = alone("bf16", layers(layout))
    for rank in pool.run(run_job, in_precision("bf16", layout, layers(layout))):
        assert relative_error(rank.losses, one.losses) < 1e-2
        assert relative_error(rank.norms, one.norms) < 5e-2
        assert not rank.unequal_copies


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2-sp-ep2"])
def test_experts_in_bf16_follow_one_process_in_bf16(pool, layout):
    """The first loss: after it a token may go to another expert for a bit's sake."""
    one = run_job(in_precision("bf16", None, 2, "moe"))
    for rank in pool.run(run_job, in_precision("bf16", layout, 2, "moe"), size=LAYOUTS[layout].processes):
        assert relative_error(rank.losses[:1], one.losses[:1]) < 2e-3
        assert relative_error(rank.losses, one.losses) < 3e-2
        assert not rank.unequal_copies


def run_traced_job(config: RunConfig) -> Outcome:
    """The job with layers that are traced and differentiated by torch.compile, but not made into machine code."""
    compile_module = torch.nn.Module.compile

    def trace(self, **options):
        compile_module(self, backend="aot_eager", **options)

    torch._dynamo.reset()
    with mock.patch.object(torch.nn.Module, "compile", trace):
        return run_job(config)


# By default parallel/test_tensor_parallel.py and test_context_model.py trace layers, test_inductor.py halves of them,
# and test_parity.py shows halves in eager mode.
@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2-sp-overlap", "cp2", "pp2"])
def test_compiled_layers_equal_one_process_in_eager_mode(pool, layout):
    small = {"model": {"num_layers": 2}, "train": {"train_iters": 2}}
    config = run_config(RUN, layout, "", **small, runtime={"compile": True})
    ranks = pool.run(run_traced_job, config, size=LAYOUTS[layout].processes)
    errors = compare(ranks, run_job(run_config(RUN, None, "", **small)))
    assert errors.within(), errors
