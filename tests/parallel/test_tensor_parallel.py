"""Loss, logits and every parameter's gradient of a model cut over the tensor axis equal those of one process."""

import functools

import pytest
from tensor_job import GPT2, LLAMA, assert_equal, outcome

from megalith.config import ModelConfig


def change(model: ModelConfig, **fields) -> ModelConfig:
    return ModelConfig(**{**model.model_dump(), **fields})


MODELS = {
    "gpt2": GPT2,
    "gpt2 untied": change(GPT2, untie_embeddings_and_output_weights=True),
    "gpt2 dropout": change(GPT2, hidden_dropout=0.2, attention_dropout=0.2),
    "gpt2 uneven vocabulary": change(GPT2, make_vocab_size_divisible_by=1),
    "llama": LLAMA,
    "llama tied, qkv biases": change(LLAMA, untie_embeddings_and_output_weights=False, add_qkv_bias=True),
    "llama two groups": change(LLAMA, num_query_groups=2, add_bias_linear=True),
    "llama one group, dropout": change(
        LLAMA, num_query_groups=1, hidden_dropout=0.2, attention_dropout=0.2, add_qkv_bias=True
    ),
    "llama uneven vocabulary": change(LLAMA, make_vocab_size_divisible_by=1),
}


@functools.cache
def alone(name: str):
    return outcome(MODELS[name])


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp+sp"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_one_pass_equals_one_process(pool, name, size, sequence_parallel):
    for result in pool.run(outcome, MODELS[name], size, sequence_parallel, size=size):
        assert_equal(result, alone(name))


@pytest.mark.parametrize("name", ["gpt2 dropout", "llama one group, dropout"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp+sp"])
def test_layers_traced_in_one_graph_equal_one_process(pool, name, sequence_parallel):
    for result in pool.run(outcome, MODELS[name], 2, sequence_parallel, "aot_eager", size=2):
        assert_equal(result, alone(name))


def test_a_layer_compiled_to_machine_code_equals_one_process(pool):
    model = change(LLAMA, num_layers=1)
    for result in pool.run(outcome, model, 2, True, "inductor", size=2):
        assert_equal(result, outcome(model))
