"""A weight in codes: its linear computes as one with the decoded weight, and no pass saves a decoded weight."""

import pytest
import torch
from default_cases import in_full
from torch.autograd.graph import saved_tensors_hooks

from megalith.config import LoraConfig, ModelConfig
from megalith.config.presets import PRESETS
from megalith.models.adapters import add_adapters
from megalith.models.init import initialize
from megalith.models.transformer import Transformer
from megalith.ops.weight_codes import assemble, encode, take
from megalith.parallel.coded_base import apply_coded_base, base_matrices, coded_weights

CONFIG = ModelConfig(
    **{**PRESETS["tiny-llama"], "hidden_size": 128, "ffn_hidden_size": 192, "num_layers": 2},
    vocab_size=101,
    max_position_embeddings=64,
)
IDS = torch.randint(0, 101, (2, 24), generator=torch.Generator().manual_seed(0))


def build(form: str, config: ModelConfig = CONFIG, **settings) -> tuple[Transformer, Transformer]:
    """A model with adapters on a base in codes, and one on the decoded base."""
    lora, models = LoraConfig(rank=3, **settings), []
    for quantize_base in (form, "none"):
        model = Transformer(config, device="meta")
        add_adapters(model, lora)
        dense = Transformer(config)
        initialize(dense, config, seed=3)
        apply_coded_base(model, lora.model_copy(update={"quantize_base": quantize_base}))
        model.to_empty(device="cpu")
        initialize(model, config, seed=3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(1))
                if "lora_magnitude" in name:
                    parameter.fill_(0.5)
        for name, weight in coded_weights(model).items():
            values = dense.get_parameter(name).detach()
            codes = assemble(form, values.shape, [encode(form, values, torch.arange(len(values)))])
            weight.fill(take(form, codes, slice(0, len(values)), slice(0, values.shape[1])))
        models.append(model)
    decoded = dict(models[0].named_modules())
    with torch.no_grad():
        for name, module in base_matrices(models[1]):
            module.weight.copy_(decoded[name].coded.decoded())
    return models[0], models[1]


def gradients(model: Transformer) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[int]]:
    """Loss, gradients and the bytes of the saved tensors."""
    saved = []
    with saved_tensors_hooks(lambda x: (saved.append(x.nbytes), x)[1], lambda x: x):
        loss = model(IDS, labels=IDS)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}, saved


@pytest.mark.parametrize(("form", "dora"), [("nf4", False), ("fp8", True)])
def test_gradients_are_those_on_the_decoded_base_and_no_decoded_weight_is_saved(
    form: str, dora: bool
) -> None:
    ours, theirs = build(form, use_dora=dora)
    (loss, grads, saved), (expected, others, dense) = gradients(ours), gradients(theirs)
    assert torch.equal(loss, expected) and grads.keys() == others.keys()
    assert all(torch.equal(grad, others[name]) and grad.norm() > 0 for name, grad in grads.items())
    weights = {module.weight.nbytes for _, module in base_matrices(theirs)}
    assert min(weights) > 4 * IDS.numel() * CONFIG.ffn_size and weights <= set(dense)
    assert not weights & set(saved)


@pytest.mark.parametrize("form", [in_full("nf4"), "fp8"])
def test_a_compiled_layer_is_one_graph_and_saves_no_decoded_weight(form: str) -> None:
    ours, theirs = build(form, CONFIG.model_copy(update={"num_layers": 1}))
    for model in (ours, theirs):
        for layer in model.layers.values():
            layer.compile(fullgraph=True, backend="aot_eager_decomp_partition")
    (loss, grads, saved), (expected, others, _) = gradients(ours), gradients(theirs)
    torch._dynamo.reset()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert all(torch.allclose(grad, others[name], rtol=1e-4, atol=1e-7) for name, grad in grads.items())
    weights = {module.weight.nbytes for _, module in base_matrices(theirs)}
    assert not weights & set(saved)
