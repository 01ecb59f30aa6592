"""Gradients are summed in fp32 whatever the compute dtype."""

from dataclasses import replace

import pytest
from data_job import GPT2, LLAMA, Job, assert_equal, train

MANY = 32  # samples: 16 micro-batches a rank
STRATEGIES = {"no_shard": GPT2, "optim": LLAMA, "optim_grads": LLAMA, "optim_grads_params": GPT2}
LATER = "optim, weight gradients that come later"


def many(model) -> Job:
    return Job(model, precision="bf16", samples=MANY, steps=1)


@pytest.fixture(scope="module")
def trained(pool):
    cases = {
        name: many(model).with_parallel(data_parallel_sharding_strategy=name)
        for name, model in STRATEGIES.items()
    }
    cases[LATER] = replace(cases["optim"], puts_off_weights=True)
    return pool.run_cases(train, {name: (job,) for name, job in cases.items()}, size=2)


@pytest.mark.parametrize("name", [*STRATEGIES, LATER])
def test_bf16_gradients_of_many_micro_batches_add_up_in_fp32(trained, name):
    """One process adds bf16 gradients to fp32 ones; adding them up in bf16 would be off by 1e-2."""
    assert_equal(trained[name], train(many(STRATEGIES.get(name, LLAMA))), bound=2e-6)
