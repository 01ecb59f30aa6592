"""Loss, logits and every parameter's gradient of a model cut over the tensor axis equal those of one process."""

import functools
import itertools

import pytest
import torch
from tensor_job import (
    GPT2,
    LLAMA,
    assert_equal,
    batch,
    generated,
    layout,
    outcome,
    outcome_of_logits,
    tensor_parallel_model,
)

from megalith.config import ModelConfig
from megalith.errors import ConfigError
from megalith.launch.pool import RankFailed


def change(model: ModelConfig, **fields) -> ModelConfig:
    return ModelConfig(**{**model.model_dump(), **fields})


MODELS = {
    "gpt2": GPT2,
    "gpt2 untied": change(GPT2, untie_embeddings_and_output_weights=True),
    "gpt2 dropout": change(GPT2, hidden_dropout=0.2, attention_dropout=0.2),
    "gpt2 uneven vocabulary": change(GPT2, make_vocab_size_divisible_by=1),
    "llama": LLAMA,
    "llama tied, qkv biases, norms of heads": change(
        LLAMA,
        untie_embeddings_and_output_weights=False,
        add_qkv_bias=True,
        qk_layernorm=True,
        normalization="LayerNorm",
    ),
    "llama two groups": change(LLAMA, num_query_groups=2, add_bias_linear=True),
    "llama one group, dropout": change(
        LLAMA, num_query_groups=1, hidden_dropout=0.2, attention_dropout=0.2, add_qkv_bias=True
    ),
    "llama uneven vocabulary": change(LLAMA, make_vocab_size_divisible_by=1),
}


@functools.cache
def alone(name: str):
    return outcome(MODELS[name])


WITH_AND_WITHOUT_SP = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp+sp"])


@pytest.fixture(scope="module")
def passes(pool):
    """By number of ranks, then by name and whether with sequence parallelism."""
    ways = list(itertools.product(MODELS, (False, True)))
    return {
        size: pool.run_cases(
            outcome, {(name, sp): (MODELS[name], layout(size, sp)) for name, sp in ways}, size
        )
        for size in (2, 4)
    }


@WITH_AND_WITHOUT_SP
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_one_pass_equals_one_process(passes, name, size, sequence_parallel):
    for result in passes[size][name, sequence_parallel]:
        assert_equal(result, alone(name))


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("name", ["gpt2 uneven vocabulary", "llama one group, dropout"])
def test_partial_gradients_are_summed_where_data_parallelism_shards_them(pool, name, strategy):
    for result in pool.run(outcome, MODELS[name], layout(2, True, strategy)):
        assert_equal(result, alone(name))


@WITH_AND_WITHOUT_SP
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("name", ["gpt2", "llama uneven vocabulary"])
def test_gradients_through_the_gathered_logits_equal_one_process(pool, name, softcap, sequence_parallel):
    model = change(MODELS[name], final_logit_softcapping=softcap)
    whole = outcome_of_logits(model)
    for result in pool.run(outcome_of_logits, model, layout(2, sequence_parallel), size=2):
        assert_equal(result, whole)


@WITH_AND_WITHOUT_SP
@pytest.mark.parametrize("name", ["gpt2", "llama one group, dropout"])
def test_generated_tokens_equal_one_process(pool, name, sequence_parallel):
    expected = generated(MODELS[name])
    for tokens in pool.run(generated, MODELS[name], layout(4, sequence_parallel)):
        assert tokens == expected


@pytest.mark.parametrize(
    "name, sequence_parallel",
    [("gpt2 dropout", True), pytest.param("llama one group, dropout", False, marks=pytest.mark.full)],
)
def test_a_layer_traced_in_one_graph_equals_one_process(pool, name, sequence_parallel):
    model = change(MODELS[name], num_layers=1)
    for result in pool.run(outcome, model, layout(2, sequence_parallel), "aot_eager", size=2):
        assert_equal(result, outcome(model))


@pytest.mark.full
def test_a_layer_compiled_to_machine_code_equals_one_process(pool):
    model = change(LLAMA, num_layers=1)
    for result in pool.run(outcome, model, layout(2, True), "inductor", size=2):
        assert_equal(result, outcome(model))


def shapes_kept_for_backward() -> list[torch.Size]:
    """Of the tensors that a layer keeps, of a model with 32 tokens and a hidden size of 32 on two ranks."""
    model, _ = tensor_parallel_model(LLAMA, layout(2, True))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape), lambda x: x):
        model(**batch(LLAMA.vocab_size))
    return kept


def test_under_sequence_parallelism_no_rank_keeps_the_whole_residual_stream(pool):
    for kept in pool.run(shapes_kept_for_backward, size=2):
        assert torch.Size([1, 16, 32]) in kept or torch.Size([16, 32]) in kept
        assert not [
            shape for shape in kept[:-2] if shape[-2:] == (32, 32)
        ]  # the last two are the loss's gradients


def train_on_tokens_that_cannot_be_cut():
    model, _ = tensor_parallel_model(GPT2, layout(2, True))
    model(torch.zeros(1, 15, dtype=torch.int64))


def test_training_on_tokens_that_sequence_parallelism_cannot_cut_is_refused(pool):
    with pytest.raises(RankFailed) as failure:
        pool.run(train_on_tokens_that_cannot_be_cut, size=2)
    assert isinstance(failure.value.__cause__, ConfigError)
    assert "cannot cut 15 tokens over 2" in str(failure.value.__cause__)
