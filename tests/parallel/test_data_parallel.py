"""Data parallelism against one process: losses, gradients and norms, for every strategy."""

import functools

import pytest
from data_job import GPT2, LLAMA, Job, Outcome, Trained, assert_equal, train

from megalith.config import ModelConfig

FAMILIES = {"gpt2": GPT2, "llama": LLAMA}
OTHER_EMBEDDING = {  # an untied GPT-2 and a tied Llama
    family: model.model_copy(update={"untie_embeddings_and_output_weights": family == "gpt2"})
    for family, model in FAMILIES.items()
}
STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


RECOMPUTED = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "selective": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "mlp", "layernorm"],
    },
}


def sharded(job: Job, strategy: str, **parallel) -> Job:
    return job.with_parallel(data_parallel_sharding_strategy=strategy, **parallel)


# ranks: what is shown of which job there
JOBS: dict[int, dict[str, Job]] = {
    4: {
        **{f"{f}, {s}": sharded(Job(FAMILIES[f]), s) for f in FAMILIES for s in STRATEGIES},
        **{
            f"two copies of two shards, {s}": sharded(Job(LLAMA), s, num_distributed_optimizer_instances=2)
            for s in STRATEGIES[1:]
        },
        "context ranks take part": sharded(Job(LLAMA), "optim", context_parallel_size=2),
        **{
            f"over tensor parallel shards, {s}": sharded(
                Job(LLAMA), s, tensor_model_parallel_size=2, sequence_parallel=sp
            )
            for s, sp in zip(STRATEGIES, (False, True, False, True))
        },
    },
    2: {
        **{
            f"an evaluation between the steps, {s}": sharded(Job(GPT2, evaluate_after=1), s)
            for s in STRATEGIES
        },
        **{
            f"recomputed {name}, {s}": sharded(Job(GPT2), s, **recompute)
            for name, recompute in RECOMPUTED.items()
            for s in ("no_shard", "optim_grads_params")
        },
        "small buckets": sharded(Job(GPT2), "no_shard", dp_comm_overlap_bucket_size=4_000),
        "one bucket": sharded(Job(GPT2), "no_shard", dp_comm_overlap_bucket_size=10_000_000),
        "the last layer is not freed": sharded(Job(GPT2), "optim_grads_params", fsdp_unsharded_layers=1),
        "no layer is freed": sharded(Job(GPT2), "optim_grads_params", fsdp_unsharded_layers=2),
        **{
            f"the other embedding, {f}": sharded(Job(OTHER_EMBEDDING[f]), "optim_grads_params")
            for f in FAMILIES
        },
        **{
            f"weight gradients that come later, {s}": sharded(Job(GPT2, puts_off_weights=True), s)
            for s in ("no_shard", "optim")
        },
        "compiled": sharded(Job(GPT2, compile=True), "optim_grads_params"),
    },
}


@pytest.fixture(scope="module")
def trained(pool):
    return {
        size: pool.run_cases(train, {n: (job,) for n, job in jobs.items()}, size)
        for size, jobs in JOBS.items()
    }


@functools.cache
def one_process(model: str, steps: int) -> Outcome:
    return train(Job(ModelConfig.model_validate_json(model), steps=steps))


@pytest.mark.parametrize("size, name", [(size, name) for size, jobs in JOBS.items() for name in jobs])
def test_losses_gradients_and_norms_equal_one_process(trained, size, name):
    job = JOBS[size][name]
    assert_equal(trained[size][name], one_process(job.model.model_dump_json(), job.steps))


def test_one_process_has_plain_parameters_and_needs_no_process_group():
    run = Trained(Job(GPT2))
    assert all(plain is run.model.get_parameter(name) for name, plain in run.local.named)
