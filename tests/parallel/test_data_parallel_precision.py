"""Gradients are summed in fp32 whatever the compute dtype, and sent in it; what stays gathered is gathered once."""

import functools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from data_job import GPT2, LLAMA, Job, Outcome, assert_equal, collectives, train
from default_cases import by_default, cases_that_run

from megalith.config import ModelConfig
from megalith.parallel.data.fsdp_reduce_scatter import Fp32SumReduceScatter

MANY = 16  # samples: 8 micro-batches a rank
STRATEGIES = {"no_shard": GPT2, "optim": LLAMA, "optim_grads": LLAMA, "optim_grads_params": GPT2}
EXCHANGED = dict(reduce_scatter_with_fp32_accumulation=True)
SENT = "optim_grads_params, sent in bf16"
LATER = "optim, weight gradients that come later"


def many(model) -> Job:
    return Job(model, precision="bf16", samples=MANY, steps=1)


@pytest.fixture(scope="module")
def trained(pool, request):
    cases = {
        name: many(model).with_parallel(data_parallel_sharding_strategy=name)
        for name, model in STRATEGIES.items()
    }
    cases[SENT] = many(GPT2).with_parallel(data_parallel_sharding_strategy="optim_grads_params", **EXCHANGED)
    cases[LATER] = replace(cases["optim"], puts_off_weights=True)
    that_run = cases_that_run(request, cases, "name")
    return pool.run_cases(train, {name: (cases[name],) for name in that_run}, size=2)


@functools.cache
def alone(model: str) -> Outcome:
    return train(many(ModelConfig.model_validate_json(model)))


@pytest.mark.parametrize("name", by_default([*STRATEGIES, SENT, LATER], "optim", "optim_grads_params", SENT))
def test_bf16_gradients_of_many_micro_batches_add_up_in_fp32(trained, name):
    """One process adds bf16 gradients to fp32 ones; adding them up in bf16 would be off by more than 1e-3."""
    model = STRATEGIES[name.split(",")[0]]
    assert_equal(trained[name], alone(model.model_dump_json()), bound=2e-6)


def test_a_step_gathers_what_stays_once_and_sends_the_layers_gradients_in_bf16(pool):
    """Four micro-batches a rank of two layers, embedding and head, of which nothing is freed between them."""
    kept = dict(data_parallel_sharding_strategy="optim_grads_params", fsdp_unsharded_layers=2, **EXCHANGED)
    job = replace(Job(LLAMA, precision="bf16"), samples=8).with_parallel(**kept)
    for seen in pool.run_cases(collectives, {"kept": (job,)}, size=2)["kept"]:
        assert Counter(seen) == {
            ("all-gather", torch.bfloat16): 2,
            ("all-gather", torch.float32): 2,
            ("all-to-all", torch.bfloat16): 2 * 4,
            ("reduce-scatter", torch.float32): 2 * 4,
        }
        head, *_, embedding = (name for name, dtype in seen[-4:])
        assert head == embedding == "reduce-scatter"  # the head's is behind the last layer's backward pass


def test_result_is_told_from_an_input_also_after_an_exception():
    exchange = Fp32SumReduceScatter(SimpleNamespace(_get_fsdp_state=dict), ranks=2, replicas=False)
    asked = [8, 8, 4, 8, 4]  # an exception came between the first two: both are inputs
    dtypes = [
        exchange.allocate((size,), dtype=torch.bfloat16, device=torch.device("cpu")).dtype for size in asked
    ]
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]
