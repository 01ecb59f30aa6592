"""OLMo Hybrid: the three forms of its convolution in files, the published config.json, padding, and norms by layer."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from models.hybrid_cases import CONVOLVED, OLMO_HYBRID
from models.reference import VOCAB, random_reference
from safetensors.torch import load_file, save_file

import megalith
from megalith.bridge.exporter import export_hf
from megalith.bridge.families.olmo_hybrid import OLMO_HYBRID as FAMILY
from megalith.bridge.importer import import_hf
from megalith.bridge.verify import same_bits
from megalith.config import ModelConfig, RunConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.models.inputs import TokenInputs
from megalith.models.transformer import Transformer

SHARED = {**OLMO_HYBRID, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_value_head_dim": 20}
CONFIG = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=VOCAB, intermediate_size=112,
              max_position_embeddings=256)  # fmt: skip
WAYS = ("published", "transformers", "joined")


def folder_in_form(form: str, path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Save a random model with `form` of its convolutions. Returns its folder and its state dict in transformers."""
    model = random_reference(transformers.OlmoHybridConfig(**SHARED, rope_parameters=dict(rope_theta=None)))
    model.save_pretrained(path)
    state = dict(model.state_dict())
    if form != "transformers":
        tensors = {}
        for name, value in state.items():
            if form == "published" and name.endswith("conv1d.weight"):
                for part, rows in zip("qkv", value.split((24, 24, 120))):
                    tensors[name.replace("conv1d", f"{part}_conv1d")] = rows.contiguous()
            else:
                tensors[name] = value.contiguous()
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path, state


@pytest.mark.parametrize("form", WAYS)
def test_each_form_of_the_convolution_is_read_and_the_published_one_is_written(
    form: str, tmp_path: Path
) -> None:
    source, state = folder_in_form(form, tmp_path / "hf")
    import_hf(source, tmp_path / "run")
    out = export_hf(tmp_path / "run", tmp_path / "out").path
    written = load_file(out / "model.safetensors")
    published, _ = folder_in_form("published", tmp_path / "published")
    expected = load_file(published / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(same_bits(written[name], expected[name]) for name in expected)
    again = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(same_bits(again[name], value) for name, value in state.items())


def test_convolutions_of_a_wrong_size_are_refused(tmp_path: Path) -> None:
    source, _ = folder_in_form("published", tmp_path / "hf")
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.2.linear_attn.v_conv1d.weight"
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"v_conv1d.weight \(stored \[119, 1, 4\], needed \[120"):
        import_hf(source, tmp_path / "run")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 9},
        {"linear_num_key_heads": 2, "linear_num_value_heads": None},
        {"hidden_size": 60, "linear_num_key_heads": 2, "linear_value_head_dim": 7, "layer_types": None},
        {"rope_theta": None},
        {"rope_parameters": None},
        {"rope_parameters": {"rope_theta": None, "rope_type": "yarn", "factor": 2.0}, "rope_theta": 500.0},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 500.0},
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
)
def test_missing_and_null_keys_mean_what_they_mean_to_transformers(changes: dict) -> None:
    tree = CONFIG | changes
    model, theirs = FAMILY.read_config(tree), transformers.OlmoHybridConfig(**json.loads(json.dumps(tree)))
    kinds = ["linear_attention" if layer in model.linear_attention_layers else "full_attention"
             for layer in range(model.num_layers)]  # fmt: skip
    assert kinds == theirs.layer_types
    for name in (
        "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
        "linear_conv_kernel_dim", "linear_allow_neg_eigval",
    ):  # fmt: skip
        assert getattr(model, name) == getattr(theirs, name), name
    theta = theirs.rope_parameters["rope_theta"]
    assert (model.position_embedding_type == "none") == (theta is None)
    assert theta is None or model.rotary_base == theta
    scaling = model.rope_scaling and model.rope_scaling.type
    assert theta is None or (scaling or "default") == theirs.rope_parameters["rope_type"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "no layer with full_attention in layer_types"),
        ({"layer_types": ["full_attention"] * 3}, "no layer with linear_attention in layer_types"),
        ({"layer_types": ["linear_attention", "full_attention", "sliding_attention"]}, "'sliding_attention'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_what_the_family_does_not_have_is_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FAMILY.read_config(CONFIG | changes)


@pytest.mark.parametrize("left", [True, False])
def test_padding_changes_no_logits_of_other_tokens(left: bool, tmp_path: Path) -> None:
    source, _ = folder_in_form("transformers", tmp_path / "hf")
    reference = transformers.AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()
    model, count = megalith.load(source), (9, 70)
    ids = torch.randint(0, VOCAB, (2, 70), generator=torch.Generator().manual_seed(3))
    padding = torch.ones(2, 70, dtype=torch.bool)
    for row, tokens in enumerate(count):
        padding[row, slice(70 - tokens, None) if left else slice(tokens)] = False
    with torch.no_grad():
        logits = model(ids, token_inputs=TokenInputs(padding=padding))
        theirs = reference(ids, attention_mask=(~padding).long()).logits
        assert (logits - theirs)[~padding].abs().max() <= 1e-5 * theirs[~padding].abs().max()
        for row in range(2):
            alone = reference(ids[row][~padding[row]][None]).logits[0]
            assert (logits[row][~padding[row]] - alone).abs().max() <= 1e-5 * alone.abs().max()


def test_norms_are_placed_by_the_kind_of_layer() -> None:
    model = FAMILY.read_config(CONFIG | {"layer_types": CONVOLVED})
    norms = {
        n: {name.split(".")[2] for name in Transformer(model, device="meta").state_dict()
            if name.startswith(f"layers.{n}.") and name.count(".") == 3 and "layernorm" in name}
        for n in range(2)
    }  # fmt: skip
    assert norms[0] == {"input_layernorm", "pre_mlp_layernorm"}
    assert norms[1] == {"post_attention_layernorm", "post_mlp_layernorm"}
    both = ModelConfig.model_validate(model.model_dump() | {"linear_norm_placement": "sandwich"})
    assert [both.norms_in_layer(n) for n in range(3)] == [4, 2, 4]


def test_equal_placement_and_epsilon_are_the_same_function_as_none() -> None:
    tree = {"preset": "tiny-llama", "experimental_attention_variant": "gated_delta_net"}
    same = {"linear_norm_placement": "pre", "linear_norm_epsilon": 1e-5, "layernorm_epsilon": 1e-5}
    one, other = (
        RunConfig.from_tree({"model": tree | {"layernorm_epsilon": 1e-5} | x}).model for x in ({}, same)
    )
    names = ("linear_norm_placement", "linear_norm_epsilon")
    assert dict(one.resolved(names)) == dict(other.resolved(names)) == dict.fromkeys(names)
