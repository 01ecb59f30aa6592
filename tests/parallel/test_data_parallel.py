"""Data parallelism against one process: losses, gradients and norms, for every strategy."""

import functools

import pytest
from data_job import GPT2, LLAMA, Job, Trained, assert_equal, train

FAMILIES = {"gpt2": GPT2, "llama": LLAMA}
STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


@functools.cache
def one_process(family: str):
    return train(Job(FAMILIES[family]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_on_four_ranks_equals_one_process(pool, family, strategy):
    job = Job(FAMILIES[family]).with_parallel(data_parallel_sharding_strategy=strategy)
    assert_equal(pool.run(train, job), one_process(family))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_with_an_evaluation_between_the_steps(pool, strategy):
    job = Job(GPT2, evaluate_after=2).with_parallel(data_parallel_sharding_strategy=strategy)
    assert_equal(pool.run(train, job, size=2), one_process("gpt2"))


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_hybrid_two_copies_of_two_shards(pool, strategy):
    layout = {"data_parallel_sharding_strategy": strategy, "num_distributed_optimizer_instances": 2}
    assert_equal(pool.run(train, Job(LLAMA).with_parallel(**layout)), one_process("llama"))


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp", "layernorm"]},
    ],
    ids=["full", "selective"],
)
def test_recomputation_sees_the_gathered_parameters(pool, strategy, recompute):
    job = Job(GPT2, steps=3).with_parallel(data_parallel_sharding_strategy=strategy, **recompute)
    one = train(Job(GPT2, steps=3))
    assert_equal(pool.run(train, job, size=2), one)


def test_an_untied_gpt2_and_a_tied_llama(pool):
    for family, untied in (("gpt2", True), ("llama", False)):
        model = FAMILIES[family].model_copy(update={"untie_embeddings_and_output_weights": untied})
        job = Job(model, steps=3).with_parallel(data_parallel_sharding_strategy="optim_grads_params")
        assert_equal(pool.run(train, job, size=2), train(Job(model, steps=3)))


def test_context_ranks_take_part_in_sharding(pool):
    job = Job(LLAMA).with_parallel(data_parallel_sharding_strategy="optim", context_parallel_size=2)
    assert_equal(pool.run(train, job), one_process("llama"))


@pytest.mark.parametrize(
    ("strategy", "sequence_parallel"),
    [("no_shard", False), ("optim", True), ("optim_grads", False), ("optim_grads_params", True)],
)
def test_over_tensor_parallel_shards(pool, strategy, sequence_parallel):
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel}
    job = Job(LLAMA).with_parallel(data_parallel_sharding_strategy=strategy, **layout)
    assert_equal(pool.run(train, job), one_process("llama"))


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_weight_gradients_that_come_later_are_reduced_at_the_end(pool, strategy):
    job = Job(GPT2, puts_off_weights=True).with_parallel(data_parallel_sharding_strategy=strategy)
    assert_equal(pool.run(train, job, size=2), one_process("gpt2"))


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_compiled_layers_trace_whole(pool, strategy):
    job = Job(GPT2, steps=3, compile=True).with_parallel(data_parallel_sharding_strategy=strategy)
    assert_equal(pool.run(train, job, size=2), train(Job(GPT2, steps=3)))


def test_one_process_has_plain_parameters_and_needs_no_process_group():
    run = Trained(Job(GPT2))
    assert all(plain is run.model.get_parameter(name) for name, plain in run.local.named)
