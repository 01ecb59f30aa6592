"""Initial weights follow from the seed and the parameter's name, and from nothing else."""

import math

import pytest
import torch

from megalith.config import ModelConfig
from megalith.config.presets import PRESETS
from megalith.models.init import BLOCK, initialize
from megalith.models.transformer import Transformer

GPT = ModelConfig(
    num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=151, max_position_embeddings=32
)
LLAMA = ModelConfig(**PRESETS["tiny-llama"], vocab_size=151, max_position_embeddings=32)


def weights(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    model = Transformer(config)
    initialize(model, config, seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


ZERO_CENTRED = LLAMA.model_copy(update={"layernorm_zero_centered_gamma": True, "norm_placement": "sandwich"})


@pytest.mark.parametrize("config", [GPT, LLAMA, ZERO_CENTRED], ids=["gpt", "llama", "zero-centred"])
def test_weights_are_normal_with_the_promised_deviation_and_norms_and_biases_are_constant(config):
    residual = config.init_method_std / math.sqrt(2 * config.num_layers)
    for name, value in weights(config).items():
        if name.endswith(".bias"):
            assert not value.any(), name
        elif "layernorm" in name:
            assert (value == 1 - config.layernorm_zero_centered_gamma).all(), name
        else:
            value = value[: config.vocab_size] if "word_embeddings" in name or "output" in name else value
            adds_to_the_residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            std = residual if adds_to_the_residual else config.init_method_std
            n = value.numel()
            assert value.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * n)), name
            assert abs(value.mean().item()) < 4 * std / math.sqrt(n), name
            kurtosis = ((value / std) ** 4).mean().item()
            assert kurtosis == pytest.approx(3, abs=5 * math.sqrt(96 / n)), name


def test_same_seed_gives_the_same_weights_and_another_seed_others():
    first, again, other = weights(GPT, 7), weights(GPT, 7), weights(GPT, 8)
    for name, value in first.items():
        assert torch.equal(value, again[name])
        if value.ndim == 2:
            assert abs(torch.corrcoef(torch.stack([value.flatten(), other[name].flatten()]))[0, 1]) < 0.05


def test_a_parameter_does_not_depend_on_which_others_exist():
    deep = GPT.model_copy(update={"num_layers": 3})
    untied = GPT.model_copy(update={"untie_embeddings_and_output_weights": True, "add_bias_linear": False})
    plain, untied_weights = weights(GPT), weights(untied)
    scale = math.sqrt(2 / 3)  # of the projections into the residual stream, whose deviation follows the depth
    for name, value in weights(deep).items():
        if name in plain:
            factor = scale if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 1.0
            torch.testing.assert_close(value, plain[name] * factor, rtol=1e-6, atol=0)
    shared = plain.keys() & untied_weights.keys()
    assert len(shared) > 10 and all(torch.equal(plain[name], untied_weights[name]) for name in shared)


def test_parameters_of_one_shape_differ_between_layers_and_roles():
    values = weights(LLAMA)
    of_a_shape = [v.flatten() for name, v in values.items() if "layers" in name and v.ndim == 2]
    for i, a in enumerate(of_a_shape):
        for b in of_a_shape[i + 1 :]:
            n = min(len(a), len(b))
            assert abs(torch.corrcoef(torch.stack([a[:n], b[:n]]))[0, 1]) < 6 / math.sqrt(n)


@pytest.mark.parametrize("divisor", [1, 8, 128, 1000])
@pytest.mark.parametrize("hidden", [6, 64])
def test_padding_of_the_vocabulary_is_zero_and_leaves_the_rest_as_it_is(divisor, hidden):
    config = GPT.model_copy(
        update={"hidden_size": hidden, "num_attention_heads": 2, "untie_embeddings_and_output_weights": True}
    )
    unpadded = weights(config.model_copy(update={"make_vocab_size_divisible_by": 1}))
    padded = weights(config.model_copy(update={"make_vocab_size_divisible_by": divisor}))
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert len(padded[name]) % divisor == 0
        assert torch.equal(padded[name][:151], unpadded[name])
        assert not padded[name][151:].any()


def test_the_values_of_a_tensor_of_several_blocks_are_independent_between_blocks():
    config = GPT.model_copy(update={"hidden_size": 1024, "num_layers": 1, "vocab_size": 3000})
    flat = weights(config)["embedding.word_embeddings.weight"].flatten()
    assert len(flat) > 2 * BLOCK
    first, second = flat[:BLOCK], flat[BLOCK : 2 * BLOCK]
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 5 / math.sqrt(BLOCK)


def test_initializing_leaves_the_global_random_state_as_it_was():
    before = torch.random.get_rng_state()
    weights(GPT)
    assert torch.equal(before, torch.random.get_rng_state())
