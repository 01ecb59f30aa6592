"""Loss, logits and every parameter's gradient of a model cut over the tensor axis equal those of one process."""

import functools
import itertools

import pytest
import torch
from default_cases import by_default, cases_that_run
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
from megalith.models.inputs import TokenInputs
from megalith.models.transformer import Transformer
from megalith.parallel.tensor.roles import ALWAYS, ROLES, role_of, shared_modules


def change(model: ModelConfig, **fields) -> ModelConfig:
    return ModelConfig(**{**model.model_dump(), **fields})


MAMBA = dict(mamba_num_heads=8, mamba_head_dim=5, mamba_state_dim=6)
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
    "llama gated delta net": change(
        LLAMA,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=2,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=5,
        linear_value_head_dim=6,
    ),
    "llama mamba2, one group": change(
        LLAMA,
        **MAMBA,
        experimental_attention_variant="mamba2",
        linear_attention_freq=2,
        mamba_num_groups=1,
        mamba_proj_bias=True,
        mamba_out_bias=True,
    ),
    "llama mamba2 in parallel": change(
        LLAMA,
        **MAMBA,
        experimental_attention_variant="mamba2",
        linear_attention_freq=3,
        mamba_num_groups=2,
        mamba_norm_before_gate=True,
        parallel_mixers=True,
    ),
    "llama short convolution": change(
        LLAMA, experimental_attention_variant="short_conv", linear_attention_freq=2, short_conv_bias=True
    ),
    "single branches": change(LLAMA, **MAMBA, mamba_num_groups=2, num_layers=3, hybrid_layer_pattern="M-*"),
}


@functools.cache
def alone(name: str):
    return outcome(MODELS[name])


# ranks, whether with sequence parallelism: both of the smallest models, and what is cut unevenly or held twice
ON_FOUR = "gpt2 uneven vocabulary", "llama two groups", "llama one group, dropout"
WAYS = {
    2: [
        ("gpt2", False),
        ("llama", False),
        ("llama gated delta net", False),
        ("llama mamba2, one group", False),
        *((name, True) for name in MODELS if name not in ON_FOUR),
    ],
    4: [
        ("gpt2", True),
        ("gpt2 uneven vocabulary", False),
        ("gpt2 uneven vocabulary", True),
        ("llama two groups", False),
        ("llama two groups", True),
        ("llama one group, dropout", False),
        ("llama one group, dropout", True),
        ("llama tied, qkv biases, norms of heads", False),
        ("llama mamba2 in parallel", False),
    ],
}
ALL_WAYS = [(size, *way) for size, ways in WAYS.items() for way in ways]
# Each parameter whose gradient is always partial, every role of a layer, and both numbers of ranks.
CHOSEN_WAYS = [
    *((size, *way) for size, *way in ALL_WAYS if not way[1] and way[0] != "gpt2 uneven vocabulary"),
    (2, "gpt2 dropout", True),
    (2, "llama gated delta net", True),
    (2, "llama mamba2, one group", True),
    (2, "llama short convolution", True),
    (2, "single branches", True),
    (4, "gpt2 uneven vocabulary", True),
    (4, "llama one group, dropout", True),
]
SHARDED = [
    ("gpt2 uneven vocabulary", "no_shard"),
    ("gpt2 uneven vocabulary", "optim_grads"),
    ("llama one group, dropout", "optim_grads_params"),
]


def partial_roles(model: ModelConfig, size: int) -> set[tuple[str, str]]:
    """The parameters of the model whose gradient is a rank's part with and without sequence parallelism."""
    transformer = Transformer(model, seed=0, device="meta")
    outputs = set()
    for name, module in transformer.named_modules():
        for kind, _ in module.named_parameters(recurse=False):
            owner = transformer.get_submodule(name.rpartition(".")[0])
            role = role_of(name, module, shared_modules(model, size), owner)
            if (role.partial_weight if kind == "weight" else role.partial_bias) == ALWAYS:
                outputs.add((name.rpartition(".")[2], kind))
    return outputs


def test_every_gradient_that_is_always_partial_is_shown_without_sequence_parallelism():
    shown = set()
    for size, name, sequence_parallel in CHOSEN_WAYS:
        if not sequence_parallel:
            shown |= partial_roles(MODELS[name], size)
    others = ROLES.keys() - {"adapter"}  # of trained tokens: tests/bridge/test_trained_tokens.py
    norms = {(name, "weight") for name in others if ROLES[name].partial_weight == ALWAYS}
    biases = {(name, "bias") for name in ("q_layernorm", "k_layernorm")}  # an out_norm has none
    shared = itertools.product(("linear_qkv", "linear_zxbcdt", "conv_xbc"), ("weight", "bias"))
    assert shown == norms | biases | set(shared)


@pytest.fixture(scope="module")
def passes(pool, request):
    """By number of ranks, name, and whether with sequence parallelism, or the strategy of data parallelism."""
    outputs = {}
    for size in WAYS:
        ways = cases_that_run(request, ALL_WAYS, "size", "name", "sequence_parallel")
        cases = {way: (MODELS[way[1]], layout(size, way[2])) for way in ways if way[0] == size}
        if size == 4:
            sharded = cases_that_run(request, SHARDED, "name", "strategy")
            cases |= {(4, name, kind): (MODELS[name], layout(2, True, kind)) for name, kind in sharded}
        outputs |= pool.run_cases(outcome, cases, size)
    return outputs


@pytest.mark.parametrize("size, name, sequence_parallel", by_default(ALL_WAYS, *CHOSEN_WAYS))
def test_one_pass_equals_one_process(passes, size, name, sequence_parallel):
    for result in passes[size, name, sequence_parallel]:
        assert_equal(result, alone(name))


@pytest.mark.parametrize("name, strategy", by_default(SHARDED, SHARDED[-1]))
def test_partial_gradients_are_summed_where_data_parallelism_shards_them(passes, name, strategy):
    for result in passes[4, name, strategy]:
        assert_equal(result, alone(name))


def test_gradients_through_the_gathered_logits_equal_one_process(pool):
    ways = itertools.product(("gpt2", "llama uneven vocabulary"), ((None, True), (0.5, False)))
    models = {(name, sp): change(MODELS[name], final_logit_softcapping=cap) for name, (cap, sp) in ways}
    cases = {(name, sp): (model, layout(2, sp)) for (name, sp), model in models.items()}
    for way, results in pool.run_cases(outcome_of_logits, cases, size=2).items():
        whole = outcome_of_logits(models[way])
        for result in results:
            assert_equal(result, whole)


@pytest.mark.parametrize(
    "name, sequence_parallel",
    by_default([("gpt2", True), ("llama one group, dropout", False)], ("llama one group, dropout", False)),
)
def test_generated_tokens_equal_one_process(pool, name, sequence_parallel):
    for result in pool.run(generated, MODELS[name], layout(4, sequence_parallel)):
        assert result == generated(MODELS[name])


@pytest.mark.full  # test_context_attention.py and models/test_transformer.py trace layers by default
@pytest.mark.parametrize(
    "name, sequence_parallel", [("gpt2 dropout", True), ("llama one group, dropout", False)]
)
def test_a_layer_traced_in_one_graph_equals_one_process(pool, name, sequence_parallel):
    model = change(MODELS[name], num_layers=1)
    for result in pool.run(outcome, model, layout(2, sequence_parallel), "aot_eager", size=2):
        assert_equal(result, outcome(model))


@pytest.mark.full
@pytest.mark.parametrize("saves", [True, False])
def test_a_layer_compiled_to_machine_code_equals_one_process(pool, saves):
    model = change(LLAMA, num_layers=1)
    parallel = layout(2, True).model_copy(update={"save_gathered_inputs": saves})
    for result in pool.run(outcome, model, parallel, "inductor", size=2):
        assert_equal(result, outcome(model))


def shapes_kept_for_backward() -> list[torch.Size]:
    """Of the tensors that a layer keeps, of a model with 32 tokens and a hidden size of 32 on two ranks."""
    model, _ = tensor_parallel_model(LLAMA, layout(2, True))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape), lambda x: x):
        values = batch(LLAMA.vocab_size)
        inputs = TokenInputs(sample_numbers=values.pop("sample_numbers"))
        model(**values, token_inputs=inputs)
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
    assert "cannot shard 15 tokens over 2" in str(failure.value.__cause__)
