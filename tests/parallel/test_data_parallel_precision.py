"""Sums in fp32 whatever the compute dtype, and steps that every rank skips together."""

import math

import pytest
import torch
from data_job import GPT2, LLAMA, Job, assemble, assert_equal, train

from megalith.config import OptimConfig

MANY = 32  # samples: 16 micro-batches a rank


@pytest.mark.parametrize(
    ("model", "strategy"),
    [(GPT2, "no_shard"), (LLAMA, "optim"), (LLAMA, "optim_grads"), (GPT2, "optim_grads_params")],
)
def test_bf16_gradients_of_many_micro_batches_add_up_in_fp32(pool, model, strategy):
    """One process adds bf16 gradients to fp32 ones; adding them up in bf16 would be off by 1e-2."""
    job = Job(model, precision="bf16", samples=MANY, steps=1)
    ranks = pool.run(train, job.with_parallel(data_parallel_sharding_strategy=strategy), size=2)
    assert_equal(ranks, train(job), bound=2e-6)


def test_bf16_weight_gradients_that_come_later_add_up_in_fp32(pool):
    job = Job(LLAMA, precision="bf16", samples=MANY, steps=1)
    later = Job(LLAMA, precision="bf16", samples=MANY, steps=1, puts_off_weights=True)
    ranks = pool.run(train, later.with_parallel(data_parallel_sharding_strategy="optim"), size=2)
    assert_equal(ranks, train(job), bound=2e-6)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_fp16_overflows_are_skipped_by_all_ranks_with_one_loss_scale(pool, strategy):
    optim = OptimConfig(lr=1e-2, clip_grad=1.0, initial_loss_scale=2.0**26, hysteresis=1)
    job = Job(LLAMA, precision="fp16", steps=12, optim=optim)
    one = train(job)
    ranks = pool.run(train, job.with_parallel(data_parallel_sharding_strategy=strategy), size=2)
    assert 0 < sum(one.skipped) < job.steps
    assert all(rank.skipped == one.skipped for rank in ranks)
    torch.testing.assert_close(torch.tensor(ranks[1].losses), torch.tensor(one.losses), rtol=1e-3, atol=0)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_a_gradient_that_is_no_number_on_one_rank_makes_all_skip(pool, strategy):
    job = Job(GPT2, steps=3, poisoned_step=1).with_parallel(data_parallel_sharding_strategy=strategy)
    ranks = pool.run(train, job)
    for rank in ranks:
        assert rank.skipped == [0.0, 1.0, 0.0]
        assert math.isnan(rank.norms[1]) and math.isfinite(rank.norms[2])
        assert all(math.isfinite(loss) for loss in rank.losses)
    assert all(value.isfinite().all() for value in assemble([rank.parameters for rank in ranks]).values())
