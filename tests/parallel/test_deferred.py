"""Wgrads put off and worked off later are those of an ordinary backward pass."""

import torch

from megalith.config import ModelConfig
from megalith.models.init import initialize
from megalith.models.linear import Linear
from megalith.models.transformer import Transformer
from megalith.parallel.pipeline.deferred_wgrad import DeferredWgrads, compute_wgrads

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    vocab_size=32,
    max_position_embeddings=8,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
TOKENS = torch.arange(16).view(2, 8)


def make(dtype=torch.float32) -> Transformer:
    model = Transformer(CONFIG, compute_dtype=dtype)
    initialize(model, CONFIG, seed=0)
    return model


def loss(model: Transformer, shift: int) -> torch.Tensor:
    return model(TOKENS, labels=(TOKENS + shift) % 32)


def linear_weights(model: Transformer) -> set[str]:
    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Linear)}


def test_the_backward_pass_leaves_out_the_wgrads_of_linear_layers_alone():
    model = make()
    weights = DeferredWgrads([model])
    loss(model, 1).backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == linear_weights(model)
    assert len(weights.take()) == 8
    assert weights.take() == []


def test_gradients_of_two_passes_worked_off_later_add_up_to_the_bit():
    expected = make()
    for shift in (1, 2):
        loss(expected, shift).backward()
    model = make()
    weights = DeferredWgrads([model])
    deferred_wgrads = []
    for shift in (1, 2):
        loss(model, shift).backward()
        deferred_wgrads.append(weights.take())
    for pending in deferred_wgrads:
        compute_wgrads(pending)
    for (name, parameter), reference in zip(model.named_parameters(), expected.parameters()):
        assert torch.equal(parameter.grad, reference.grad), name


def test_weights_cast_to_bf16_get_their_gradients_in_fp32():
    expected, model = make(torch.bfloat16), make(torch.bfloat16)
    loss(expected, 1).backward()
    weights = DeferredWgrads([model])
    loss(model, 1).backward()
    compute_wgrads(weights.take())
    for (name, parameter), reference in zip(model.named_parameters(), expected.parameters()):
        assert parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.grad, reference.grad), name


def test_nothing_is_put_off_without_gradients():
    model = make()
    weights = DeferredWgrads([model])
    with torch.no_grad():
        expected = make()(TOKENS)
        assert torch.equal(model(TOKENS), expected)
    assert weights.take() == []
