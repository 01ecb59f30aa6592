"""Every key of a config.json that changes transformers' function changes Megalith's too, or is rejected."""

from pathlib import Path

import pytest
import torch
import transformers
from config_fuzz import MODELS, Fuzzed
from default_cases import in_full

from megalith.bridge.families import FAMILIES
from megalith.bridge.importer import import_hf
from megalith.errors import CheckpointError, ConfigError

EACH = ("rope_scaling", "rope_parameters", "is_causal", "per_layer_config", "layer_types")


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_every_key_changes_both_functions_alike_or_is_refused(name: str, tmp_path: Path) -> None:
    assert Fuzzed(name, tmp_path).faults() == []


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        in_full("llama", EACH),
        ("gemma3", (*EACH, "attn_logit_softcapping", "rope_local_base_freq")),
        in_full("gpt2", ("num_attention_heads", "num_hidden_layers", "is_causal", "embd_pdrop")),
        ("olmoe", ("sliding_window", "num_local_experts", "clip_qkv")),
    ],
)
def test_some_keys_change_both_functions_alike_or_are_refused(name: str, keys, tmp_path: Path) -> None:
    assert Fuzzed(name, tmp_path).faults(keys) == []


def test_dropout_rates_that_differ_are_named() -> None:
    theirs = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, embd_pdrop=0.3).to_dict()
    with pytest.warns(UserWarning, match=r"gives model\.hidden_dropout both 0\.1 and 0\.3; 0\.1 is used"):
        FAMILIES["GPT2LMHeadModel"].read_config(theirs)


@pytest.mark.parametrize(
    "both",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {"type": "linear", "factor": 2.0, "rope_theta": 5e4},
        {"rope_theta": 77.0},
    ],
)
def test_rope_scaling_that_differs_from_rope_parameters_is_refused(both: dict) -> None:
    plain = {"rope_type": "default", "rope_theta": 5e4}
    theirs = transformers.LlamaConfig(rope_parameters=plain).to_dict()
    read = FAMILIES["LlamaForCausalLM"].read_config
    with pytest.raises(ConfigError, match=r"rope_parameters and rope_scaling, which differ in .*; keep only"):
        read(theirs | {"rope_scaling": both})
    assert read(theirs | {"rope_scaling": dict(plain)}) == read(theirs)


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.1] * 8, "long_factor": [2.0] * 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    "tree",
    [
        {"rope_parameters": YARN | {"factor": None, "original_max_position_embeddings": 32}},
        {"rope_parameters": YARN, "original_max_position_embeddings": 16},
        {"rope_parameters": LONG, "original_max_position_embeddings": 16},
        {"rope_parameters": LONG | {"original_max_position_embeddings": 16}},
    ],
)
def test_lengths_outside_the_rotary_settings_count_as_in_transformers(tree: dict, tmp_path: Path) -> None:
    fuzzed = Fuzzed("llama", tmp_path)
    logits, _ = fuzzed.ours(fuzzed.tree | tree)
    torch.testing.assert_close(logits, fuzzed.theirs(fuzzed.tree | tree)[0], atol=1e-4, rtol=1e-5)
    plain = fuzzed.theirs(fuzzed.tree)[0]
    assert (logits - plain).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "linear"}, "rotary scaling linear without factor"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 32}, "rotary scaling yarn without factor"),
        ({"rope_type": "llama3", "factor": 4.0}, "llama3 without low_freq_factor and high_freq_factor"),
        ({"rope_type": "longrope", "factor": 4.0}, "longrope without short_factor and long_factor"),
    ],
)
def test_a_rotary_scaling_without_its_numbers_is_refused(scaling: dict, message: str) -> None:
    theirs = transformers.LlamaConfig().to_dict() | {"rope_parameters": scaling}
    with pytest.raises(ConfigError, match=message):
        FAMILIES["LlamaForCausalLM"].read_config(theirs)


TEXT = dict(vocab_size=151, hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256)  # fmt: skip


def test_other_constants_of_xielu_are_refused(tmp_path: Path) -> None:
    reference = transformers.ApertusForCausalLM(transformers.ApertusConfig(**TEXT))
    reference.model.layers[1].mlp.act_fn.beta.fill_(0.7)
    reference.save_pretrained(tmp_path / "hf")
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.act_fn\.beta 0\.7, but only 0\.5 is supported; use a"
    ):
        import_hf(tmp_path / "hf", tmp_path / "run", show_progress=False)


def test_layers_of_llama4_follow_their_intervals() -> None:
    sizes = dict(num_hidden_layers=6, interleave_moe_layer_step=3, no_rope_layer_interval=2)
    theirs = transformers.Llama4TextConfig(**sizes)
    keys = ("moe_layers", "no_rope_layers", "layer_types")
    tree = {key: value for key, value in theirs.to_dict().items() if key not in keys}
    model = FAMILIES["Llama4ForCausalLM"].read_config(tree)
    assert model.expert_layers == theirs.moe_layers
    assert [int(model.uses_rope(n)) for n in range(6)] == theirs.no_rope_layers
    chunked = [kind == "chunked_attention" for kind in theirs.layer_types]
    assert [model.attention_chunk(n) is not None for n in range(6)] == chunked
    with pytest.raises(ConfigError, match="layers with RoPE must have chunked_attention and the others"):
        FAMILIES["Llama4ForCausalLM"].read_config(tree | {"layer_types": theirs.layer_types[::-1]})


@pytest.mark.parametrize("settings", [
    dict(first_k_dense_replace=3, prefix_dense_sliding_window_pattern=2, sliding_window_pattern=3),
    dict(first_k_dense_replace=1), dict(prefix_dense_sliding_window_pattern=2),
])  # fmt: skip
def test_layers_of_cohere2_moe_follow_their_patterns(settings: dict) -> None:
    sizes = dict(
        num_hidden_layers=8, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4
    )
    theirs = transformers.Cohere2MoeConfig(**sizes, **settings)
    tree = dict(settings, **sizes, intermediate_size=16, vocab_size=8, max_position_embeddings=8)
    model = FAMILIES["Cohere2MoeForCausalLM"].read_config(tree)
    assert [window is not None for window in model.windows] == [
        kind == "sliding_attention" for kind in theirs.layer_types
    ]
    assert model.expert_layers == [n for n, kind in enumerate(theirs.mlp_layer_types) if kind == "sparse"]
    with torch.device("meta"):  # their default sizes have billions of weights
        rope = [
            transformers.models.cohere2_moe.modeling_cohere2_moe.Cohere2MoeAttention(theirs, n)
            for n in range(8)
        ]
    assert [model.uses_rope(n) for n in range(8)] == [
        layer.sliding_window is not None or layer.force_rope for layer in rope
    ]


def test_dbrx_has_one_base_of_rope() -> None:
    sizes = dict(n_layers=1, d_model=16, n_heads=2, vocab_size=8)
    read = FAMILIES["DbrxForCausalLM"].read_config
    published = dict(sizes, attn_config=dict(kv_n_heads=1, rope_theta=5e5))
    with pytest.warns(
        UserWarning, match=r"computes with 10000\.0, Megalith and the model's own code with 500000\.0"
    ):
        assert read(published).rotary_base == 5e5
    assert read(sizes).rotary_base == 1e4
    both = dict(published, rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=5e5))
    assert read(both).rotary_base == 5e5 and read(both).rope_scaling.factor == 2.0
    with pytest.raises(
        ConfigError, match=r"rope_theta 500000\.0 in attn_config, and 10000\.0 in rope_parameters"
    ):
        read(dict(published, rope_parameters=dict(rope_type="default", rope_theta=1e4)))


def test_ministral3_needs_both_keys_of_its_scaling() -> None:
    tree = transformers.Ministral3Config().to_dict()
    del tree["rope_parameters"]["llama_4_scaling_beta"]
    with pytest.raises(
        ConfigError, match="llama_4_scaling_beta None and original_max_position_embeddings 16384"
    ):
        FAMILIES["Ministral3ForCausalLM"].read_config(tree)


def test_alpha_stretches_the_rotary_base_of_hunyuan() -> None:
    rope = dict(rope_type="dynamic", rope_theta=1e4, alpha=1000.0, factor=1.0, beta_fast=32, mscale=1.0)
    theirs = transformers.HunYuanDenseV1Config(**TEXT, head_dim=24, rope_parameters=rope, pad_token_id=None)
    reference = transformers.HunYuanDenseV1ForCausalLM(theirs)
    model = FAMILIES["HunYuanDenseV1ForCausalLM"].read_config(theirs.to_dict())
    frequencies = 1 / model.rotary_base ** (torch.arange(0, 24, 2) / 24)
    torch.testing.assert_close(reference.model.rotary_emb.inv_freq, frequencies, rtol=1e-6, atol=0)
    with pytest.raises(ConfigError, match=r"moe_topk .* the same for every layer"):
        FAMILIES["HunYuanMoEV1ForCausalLM"].read_config(dict(TEXT, num_experts=4, moe_topk=[2, 1, 2]))
