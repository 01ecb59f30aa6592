"""Data parallelism against one process: losses, gradients and norms, for every strategy."""

import functools

import pytest
from data_job import GPT2, LLAMA, Job, Outcome, Trained, assert_equal, train
from default_cases import by_default, cases_that_run

from megalith.config import ModelConfig

TIED = LLAMA.model_copy(update={"untie_embeddings_and_output_weights": False})


def sharded(job: Job, strategy: str, **parallel) -> Job:
    return job.with_parallel(data_parallel_sharding_strategy=strategy, **parallel)


RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp", "layernorm"]}
# ranks: what is shown of which job there; parity shows every strategy beside other axes, and evaluations between steps
JOBS: dict[int, dict[str, Job]] = {
    4: {
        "gpt2": sharded(Job(GPT2), "no_shard"),
        "gpt2, ZeRO-3": sharded(Job(GPT2), "optim_grads_params"),
        "llama": sharded(Job(LLAMA), "optim_grads_params"),
        "two copies of two shards": sharded(Job(LLAMA), "optim", num_distributed_optimizer_instances=2),
    },
    2: {
        "recomputed": sharded(Job(GPT2), "optim_grads_params", **RECOMPUTED),
        "small buckets": sharded(Job(GPT2), "no_shard", dp_comm_overlap_bucket_size=4_000),
        "the last layer is not freed": sharded(Job(GPT2), "optim_grads_params", fsdp_unsharded_layers=1),
        "a tied embedding": sharded(Job(TIED), "optim_grads_params"),
        "weight gradients that come later": sharded(Job(GPT2, puts_off_weights=True), "no_shard"),
        "compiled": sharded(Job(GPT2, compile=True), "optim_grads_params"),
    },
}


CASES = [(size, name) for size, jobs in JOBS.items() for name in jobs]
CHOSEN = (
    (4, "two copies of two shards"),
    (2, "recomputed"),
    (2, "a tied embedding"),
    (2, "weight gradients that come later"),
)


@pytest.fixture(scope="module")
def trained(pool, request):
    cases = cases_that_run(request, CASES, "size", "name")
    return {
        size: pool.run_cases(train, {n: (job,) for n, job in jobs.items() if (size, n) in cases}, size)
        for size, jobs in JOBS.items()
    }


@functools.cache
def one_process(model: str, steps: int) -> Outcome:
    return train(Job(ModelConfig.model_validate_json(model), steps=steps))


@pytest.mark.parametrize("size, name", by_default(CASES, *CHOSEN))
def test_losses_gradients_and_norms_equal_one_process(trained, size, name):
    job = JOBS[size][name]
    assert_equal(trained[size][name], one_process(job.model.model_dump_json(), job.steps))


def test_one_process_has_plain_parameters_and_needs_no_process_group():
    run = Trained(Job(GPT2))
    assert all(plain is run.model.get_parameter(name) for name, plain in run.local.named)
