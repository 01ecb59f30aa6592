"""Adapters: they begin as nothing, learn alone, and are the product that merging adds to the weight."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megalith.config import LoraConfig, ModelConfig, RunConfig
from megalith.config.presets import PRESETS
from megalith.models.adapters import ADAPTER, adapters, add_adapters
from megalith.models.init import initialize
from megalith.models.inputs import TokenInputs
from megalith.models.transformer import Transformer
from megalith.optim import build_optimizer
from megalith.planner.counts import count_parameters
from megalith.planner.flops import flops_per_token

SMALL = dict(vocab_size=101, max_position_embeddings=64)
MODELS = {
    "gpt": ModelConfig(**PRESETS["tiny-gpt"], **SMALL),
    "llama": ModelConfig(**{**PRESETS["tiny-llama"], "ffn_hidden_size": 96}, **SMALL),
    "mamba2": ModelConfig(
        **{**PRESETS["tiny-llama"], "ffn_hidden_size": 96},
        **SMALL,
        experimental_attention_variant="mamba2",
        linear_attention_freq=2,
        mamba_num_groups=2,
        mamba_head_dim=8,
        mamba_state_dim=8,
    ),
}
IDS = torch.randint(0, 101, (2, 24), generator=torch.Generator().manual_seed(0))


def build(name: str, lora: LoraConfig, b: float = 0.0) -> Transformer:
    """The model with adapters, their B filled with N(0, b)."""
    model = Transformer(MODELS[name], device="meta")
    add_adapters(model, lora)
    model.to_empty(device="cpu")
    initialize(model, MODELS[name], seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if b and "lora_B" in parameter_name:
                parameter.normal_(0.0, b, generator=generator)
    return model.eval()


def plain(name: str) -> Transformer:
    model = Transformer(MODELS[name])
    initialize(model, MODELS[name], seed=3)
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_new_adapters_change_nothing_and_are_all_that_is_trained(name):
    lora = LoraConfig(rank=4)
    model = build(name, lora)
    assert torch.equal(model(IDS), plain(name)(IDS))
    model(IDS, labels=IDS).backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert {n for n, p in model.named_parameters() if p.grad is not None} == trained.keys()
    assert trained and all(ADAPTER in n for n in trained)
    assert sum(p.numel() for p in trained.values()) == count_parameters(MODELS[name], lora=lora).adapters
    assert all(p.grad.norm() > 0 for n, p in trained.items() if "lora_B" in n)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama", ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]),
        ("llama", ["q_proj", "v_proj", "up_proj"]),
        ("llama", ["k_proj", "gate_proj", "down_proj"]),
        ("llama", ["qkv_proj", "gate_up_proj"]),
        ("gpt", ["linear_qkv", "c_proj", "c_fc"]),
        ("mamba2", ["in_proj", "linear_out", "q_proj"]),
    ],
)
def test_what_adapters_compute_is_what_their_delta_adds_to_the_weight(name, targets):
    model, merged = build(name, LoraConfig(rank=3, alpha=5.0, targets=targets), b=0.2), plain(name)
    with torch.no_grad():
        for linear, adapter in adapters(model):
            merged.get_parameter(f"{linear}.weight").add_(adapter.delta())
        expected = merged(IDS)
        assert (expected - plain(name)(IDS)).abs().max() > 0.1 * expected.abs().max()
        torch.testing.assert_close(model(IDS), expected, rtol=1e-4, atol=1e-5)


def test_dropout_is_of_what_goes_into_an_adapter_and_of_training_alone():
    model = build("llama", LoraConfig(rank=3, dropout=0.5, targets=["o_proj"]), b=0.2)
    still = model(IDS)
    model.train()
    numbers = torch.tensor([7, 8])
    once, again, other = (
        model(IDS, token_inputs=TokenInputs(sample_numbers=n)) for n in (numbers, numbers, numbers + 2)
    )
    assert torch.equal(once, again) and not torch.equal(once, other) and not torch.equal(once, still)
    assert torch.equal(model.eval()(IDS), still)
    assert torch.equal(build("llama", LoraConfig(rank=3, dropout=0.5)).train()(IDS), plain("llama")(IDS))


def test_flops_are_those_that_pytorch_counts():
    """But for what the first layer need not give back (nothing before it is trained), and the CPU's attention."""
    config, lora = MODELS["llama"], LoraConfig(rank=4)
    model = build("llama", lora, b=0.2)
    with FlopCounterMode(display=False) as counter:
        model(IDS).sum().backward()
    hidden, rows = config.hidden_size, 2 * config.hidden_size  # of linear_qkv with 2 groups of 2 heads
    first = 2 * hidden * (rows + 3 * lora.rank)
    cost = flops_per_token(config, IDS.shape[1], lora)
    padding = 4 * hidden * (config.padded_vocab_size - config.vocab_size)
    assert counter.get_total_flops() == IDS.numel() * (cost.full - cost.attention_matrix - first - padding)


def test_the_rate_of_b_is_a_multiple_of_the_rate_of_a():
    lora, optim = {"rank": 2, "loraplus_lr_ratio": 16.0}, {"lr": 1e-3}
    config = RunConfig.from_tree({"model": {"init_from": "base"}, "lora": lora, "optim": optim})
    optimizer = build_optimizer(build("llama", config.lora).named_parameters(), config.adapter_optim)
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
    assert {rate for name, rate in rates.items() if "lora_A" in name} == {1e-3}
    assert {rate for name, rate in rates.items() if "lora_B" in name} == {16e-3}


@pytest.mark.full
def test_a_layer_with_adapters_is_traced_in_one_graph():
    lora = LoraConfig(rank=2, dropout=0.1)
    losses = []
    for traced in (False, True):
        model = build("llama", lora, b=0.2).train()
        for layer in model.layers.values() if traced else ():
            layer.compile(fullgraph=True, backend="eager")
        losses.append(model(IDS, labels=IDS))
    torch._dynamo.reset()
    assert torch.equal(*losses)
