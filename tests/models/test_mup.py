"""µP: rates and initial values by role, a base model that is unchanged, a twin in plain PyTorch, and conversions."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import megalith
from megalith.bench import mup_check
from megalith.bridge.families import FAMILIES, family_for
from megalith.config import ModelConfig, OptimConfig, RunConfig
from megalith.config.rules.model_rules import check_model
from megalith.config.rules.run_rules import check_training
from megalith.errors import ConfigError
from megalith.models.init import initial_value, initialize
from megalith.models.transformer import Transformer
from megalith.optim.mup_rates import rate_factors
from megalith.optim.optimizer import set_learning_rate

VOCAB, WIDTH, BASE, LR, DECAY = 61, 32, 8, 1e-2, 0.1
SHAPE = dict(
    num_layers=4, hidden_size=WIDTH, num_attention_heads=2, vocab_size=VOCAB, make_vocab_size_divisible_by=1,
    normalization="RMSNorm", add_bias_linear=False, position_embedding_type="rope", hidden_dropout=0.0,
    attention_dropout=0.0, untie_embeddings_and_output_weights=True, init_method_std=0.1,
)  # fmt: skip
SCALED = dict(use_mup=True, mup_base_hidden_size=BASE, mup_base_head_dim=4.0)
DEEP = dict(mup_base_num_layers=2, mup_depth_alpha=0.75)


def run_of(optim: dict | None = None, **model) -> RunConfig:
    return RunConfig.from_tree(
        {
            "model": {**SHAPE, **model},
            "data": {"seq_length": 8, "mock": True},
            "optim": {"lr": LR, "weight_decay": DECAY, "clip_grad": 0.0, **(optim or {})},
            "train": {"train_iters": 5, "micro_batch_size": 2, "global_batch_size": 2},
            "runtime": {"device": "cpu", "compile": False},
        }
    )


def rates(optim: dict, **model) -> dict[str, tuple[float, float, float]]:
    """Learning rate, epsilon and weight decay by parameter name."""
    optimizer = mup_check.build(run_of(optim, **model)).optimizer
    set_learning_rate(optimizer, LR, DECAY)
    return {
        name: (group["lr"], group["eps"], group["weight_decay"])
        for group in optimizer.param_groups
        for name in group["param_names"]
    }


QKV, NORM = "layers.0.self_attention.linear_qkv.weight", "layers.0.input_layernorm.weight"
WORDS = "embedding.word_embeddings.weight"


@pytest.mark.parametrize(
    ("optim", "model", "matrix", "norm", "words"),
    [
        # Megatron-LM's get_mup_config_overrides for a width ratio of 4
        ({}, {}, (1 / 4, 1 / 4, 1), (1, 1, 0), (1, 1, 1)),
        ({"optimizer": "lion"}, {}, (1 / 4, 1 / 4, 1), (1, 1, 0), (1, 1, 1)),
        ({"optimizer": "sgd"}, {}, (1, 1 / 4, 1), (4, 1, 0), (4, 1, 1)),
        ({"optimizer": "muon"}, {}, (1, 1 / 4, 1), (1, 1, 0), (1, 1, 1)),
        # CompleteP, as its authors' configure_optimizers in nanoGPT-mup, for a depth ratio of 2 and α = 0.75, but for
        # the epsilon of embeddings, whose gradients do not depend on the depth
        ({}, DEEP, (2**-0.25 / 4, 2**-0.75 / 4, 1), (2**-0.25, 2**-0.75 / 4, 0), (1, 1 / 4, 1)),
        ({}, {"mup_scale_weight_decay": True}, (1 / 4, 1 / 4, 4), (1, 1, 0), (1, 1, 1)),
        ({"param_groups": [{"pattern": QKV, "lr": LR / 2}]}, {}, (1 / 2, 1 / 4, 1), (1, 1, 0), (1, 1, 1)),
        ({"param_groups": [{"pattern": "*", "lr_mult": 2}]}, {}, (1 / 2, 1 / 4, 1), (2, 1, 0), (2, 1, 1)),
    ],
)
def test_rates_follow_the_published_tables(optim, model, matrix, norm, words):
    measured = rates(optim, **SCALED, **model)
    for name, factors in ((QKV, matrix), (NORM, norm), (WORDS, words), ("output_layer.weight", words)):
        scale = (LR, OptimConfig().adam_eps, DECAY)
        assert measured[name] == pytest.approx([value * factor for value, factor in zip(scale, factors)]), (
            name
        )


def test_routers_and_latents_are_matrices_and_biases_norms_taps_and_adapters_are_not():
    ratios = ModelConfig(**SHAPE | SCALED).mup_ratios
    for name, ndim, is_matrix in [
        ("layers.1.mlp.router.weight", 2, True), ("layers.1.mlp.experts.linear_fc1.weight", 3, True),
        ("layers.1.mlp.experts.linear_fc1.bias", 2, False),
        ("layers.1.self_attention.q_layernorm.weight", 2, False), ("layers.1.self_attention.conv.weight", 3, False),
        ("layers.1.self_attention.linear_qkv.lora_A.weight", 2, False),
        ("layers.1.self_attention.linear_kv_down_proj.weight", 2, True), ("final_layernorm.weight", 1, False),
        ("embedding.position_embeddings.weight", 2, False),
    ]:  # fmt: skip
        assert rate_factors(name, ndim, "adamw", ratios).lr == (0.25 if is_matrix else 1.0), name


def test_initial_values_follow_megatrons_and_the_base_model_is_unchanged():
    shape = torch.Size((64, 64))
    for name, scale in [
        ("layers.0.mlp.linear_fc1.weight", 0.1 / 2), ("layers.0.mlp.linear_fc2.weight", 0.1 / 2 / math.sqrt(2 * 4)),
        ("layers.0.mlp.router.weight", 0.1 / 2), ("embedding.word_embeddings.weight", 0.1),
        ("output_layer.weight", 0.1),
    ]:  # fmt: skip
        plain, ours = (
            initial_value(name, shape, ModelConfig(**{**SHAPE, **more, "vocab_size": 64}), 1)
            for more in ({}, SCALED)
        )
        base_std = 0.1 / math.sqrt(8) if "fc2" in name else 0.1
        torch.testing.assert_close(ours, plain * (scale / base_std), rtol=1e-6, atol=0)
        deep = initial_value(name, shape, ModelConfig(**{**SHAPE, **SCALED, **DEEP, "vocab_size": 64}), 1)
        torch.testing.assert_close(deep, ours * (math.sqrt(2) if "fc2" in name else 1), rtol=1e-6, atol=0)
    base = SCALED | dict(mup_base_hidden_size=WIDTH, mup_base_head_dim=16.0, mup_base_num_layers=4)
    config = ModelConfig(**SHAPE | base)
    assert (config.attention_scale, config.logits_divisor, config.branch_factor) == (0.25, 1, 1)
    assert rates({}, **base) == rates({})
    assert torch.equal(
        initial_value(QKV, shape, config, 1), initial_value(QKV, shape, ModelConfig(**SHAPE), 1)
    )


class Twin(nn.Module):
    """The µP Transformer as its definition reads, with the parameters of ours."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.weights = nn.ParameterDict(
            {
                name.replace(".", "/"): parameter.detach().clone()
                for name, parameter in model.named_parameters()
            }
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = {name.replace("/", "."): value for name, value in self.weights.items()}
        norm = lambda x, name: F.rms_norm(x, x.shape[-1:], weight[name], 1e-5)  # noqa: E731
        x = weight[WORDS][tokens]
        rows, seq, width = x.shape
        for layer in map("layers.{}.".format, range(4)):
            qkv = (
                norm(x, layer + "input_layernorm.weight")
                @ weight[layer + "self_attention.linear_qkv.weight"].T
            )
            query, key, value = qkv.view(rows, seq, 2, 3, 16).permute(3, 0, 2, 1, 4)
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=2 / 16
            )  # √4 / head_dim
            out = (
                out.transpose(1, 2).reshape(rows, seq, width)
                @ weight[layer + "self_attention.linear_proj.weight"].T
            )
            x = x + 2**-0.75 * out  # d^-α
            hidden = norm(x, layer + "pre_mlp_layernorm.weight") @ weight[layer + "mlp.linear_fc1.weight"].T
            x = x + 2**-0.75 * F.gelu(hidden, approximate="tanh") @ weight[layer + "mlp.linear_fc2.weight"].T
        return norm(x, "final_layernorm.weight") / 4 @ weight["output_layer.weight"].T  # 1 / m


def test_training_equals_a_twin_with_adamw_and_the_published_rates():
    config = run_of(position_embedding_type="rope", no_rope_freq=1, **SCALED, **DEEP)
    optimizer = mup_check.build(config)
    twin = Twin(optimizer.model.chunks[0])
    groups = []
    for name, parameter in twin.weights.items():
        is_matrix, in_layers = "linear_" in name, name.startswith("layers")
        lr = LR * (2**-0.25 if in_layers else 1) / (4 if is_matrix else 1)
        eps = 1e-8 * (2**-0.75 if in_layers else 1) / 4
        groups.append(dict(params=[parameter], lr=lr, eps=eps, weight_decay=DECAY * (parameter.ndim > 1)))
    adamw = torch.optim.AdamW(groups)
    dataset = megalith.MockDataset(VOCAB, 8, 20, seed=0)
    for batch in megalith.Loader(dataset, micro_batch_size=2, batch_sizes=[2] * 5, vocab_size=VOCAB):
        loss = optimizer.model.backward([batch]).item()
        optimizer.step()
        expected = F.cross_entropy(twin(batch.input_ids).flatten(0, 1), batch.labels.flatten())
        adamw.zero_grad()
        expected.backward()
        adamw.step()
        assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_the_settings_without_mup_are_the_same_function():
    scaled = ModelConfig(**SHAPE | SCALED | DEEP)
    plain = scaled.without_mup()
    assert not plain.use_mup and plain.mup_base_hidden_size is None
    assert (plain.logits_scaling, plain.softmax_scale) == (4, 2 / 16)
    models = [Transformer(config) for config in (scaled, plain)]
    initialize(models[0], scaled, seed=1)
    models[1].load_state_dict(models[0].state_dict())
    tokens = torch.arange(12).view(2, 6)
    logits, others = (model.eval()(tokens) for model in models)
    assert torch.equal(logits, others)
    assert ModelConfig(**SHAPE).without_mup() == ModelConfig(**SHAPE)


def test_the_factors_are_exported_to_a_format_that_has_them():
    config = ModelConfig(**SHAPE | SCALED | DEEP, swiglu=True, ffn_hidden_size=64, max_position_embeddings=8)
    family = family_for(config)
    assert family.architecture == "GraniteForCausalLM"
    written = family.write_config(config)
    assert (written["logits_scaling"], written["attention_multiplier"]) == (4, 2 / 16)
    assert written["residual_multiplier"] == pytest.approx(2**-0.75)
    with pytest.raises(ConfigError, match="logits_scaling"):
        FAMILIES["LlamaForCausalLM"].write_config(config)


def test_activations_keep_their_size_over_widths_with_mup_alone(capsys):
    words = ["--widths", "64", "192", "--steps", "3"]
    assert mup_check.main(words) == 0
    standard, scaled = capsys.readouterr().out.strip().split("\n\n")
    assert "| logits of the labels |" in scaled
    assert max(float(row.split("|")[-2]) for row in standard.splitlines()[2:]) > 1.5


def test_losses_over_learning_rates_are_printed_and_drawn(tmp_path, capsys):
    words = [
        "--widths",
        "16",
        "32",
        "--rates",
        "1e-3",
        "1e-2",
        "--steps",
        "2",
        "--plot",
        str(tmp_path / "a.png"),
    ]
    assert (
        mup_check.main([*words, "model.num_layers=1", "data.seq_length=8", "model.ffn_hidden_size=16"]) == 0
    )
    assert capsys.readouterr().out.count("| width 32 |") == 2
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("model", "optim", "message"),
    [
        (dict(use_mup=True, model_type="bert"), {}, "µP supports only model.model_type gpt, not bert"),
        (dict(mup_base_hidden_size=8), {}, "use_mup"),
        (dict(use_mup=True, mup_depth_alpha=0.5), {}, "mup_base_num_layers"),
        (SCALED | DEEP, {"optimizer": "sgd"}, "scales rates by depth"),
    ],
)
def test_contradictions_are_refused(model, optim, message):
    with pytest.raises(ConfigError, match=message):
        config = run_of(optim, **model)
        check_model(config.model)
        check_training(config)
