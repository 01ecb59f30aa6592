"""Every key of a config.json that changes transformers' function changes Megalith's too, or is rejected."""

import json
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from config_fuzz import MODELS, Fuzzed
from default_cases import by_default, in_full
from models.reference import random_parameters
from safetensors.torch import load_file, save_file

import megalith
from megalith.bridge.exporter import export_hf
from megalith.bridge.families import FAMILIES
from megalith.bridge.importer import import_hf
from megalith.bridge.verify import certify
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


TEXT = dict(vocab_size=151, hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256)  # fmt: skip
VISION = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28,
              patch_size=14)  # fmt: skip
QWEN_VISION = dict(hidden_size=32, intermediate_size=32, num_heads=2, depth=1, out_hidden_size=64, patch_size=14,
                   deepstack_visual_indexes=[0])  # fmt: skip
MROPE = dict(rope_type="default", rope_theta=5e3, mrope_section=[2, 3, 3])
DELTA_NETS = dict(head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
                  linear_value_head_dim=24, layer_types=["linear_attention", "full_attention", "linear_attention"],
                  rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25,
                                       mrope_section=[2, 1, 1], mrope_interleaved=True))  # fmt: skip
SIGLIP = dict(VISION, model_type="siglip_vision_model")
WRAPPERS = {
    "Gemma3": dict(
        text_config=dict(TEXT, head_dim=24, query_pre_attn_scalar=20, sliding_window=11, pad_token_id=0),
        vision_config=dict(VISION, model_type="siglip_vision_model"), mm_tokens_per_image=4,
    ),
    "Llava": dict(
        text_config=dict(TEXT, model_type="llama"), vision_config=dict(VISION, model_type="clip_vision_model")
    ),
    "LlavaNext": dict(
        text_config=dict(TEXT, model_type="mistral", sliding_window=None),
        vision_config=dict(VISION, model_type="clip_vision_model"), image_grid_pinpoints=[[28, 28]],
    ),
    "InternVL": dict(
        text_config=dict(TEXT, model_type="qwen2"),
        vision_config=dict(VISION, model_type="internvl_vision", image_size=[28, 28], patch_size=[14, 14]),
    ),
    "Aria": dict(
        text_config=dict(TEXT, moe_num_experts=4, pad_token_id=0),
        vision_config=dict(VISION, model_type="idefics3_vision"), projector_patch_to_query_dict={4: 2},
    ),
    "Llama4": dict(
        text_config=dict(TEXT, intermediate_size_mlp=80, num_local_experts=4, interleave_moe_layer_step=2,
                         attention_chunk_size=9, floor_scale=7, no_rope_layer_interval=2, pad_token_id=None),
        vision_config=dict(VISION, vision_output_dim=32, projector_input_dim=32, projector_output_dim=32),
    ),
    "Mistral3, Ministral 3": dict(
        text_config=dict(TEXT, model_type="ministral3", sliding_window=None, pad_token_id=None, rope_parameters=dict(
            rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=16, mscale=1.0,
            mscale_all_dim=1.0, llama_4_scaling_beta=0.1)),
        vision_config=dict(VISION, model_type="pixtral", head_dim=16),
    ),
    "Qwen2VL": dict(text_config=dict(TEXT, rope_parameters=MROPE), vision_config=QWEN_VISION),
    "Qwen2_5_VL": dict(text_config=dict(TEXT, rope_parameters=MROPE), vision_config=QWEN_VISION),
    "Qwen3VL": dict(
        text_config=dict(TEXT, head_dim=24, rope_parameters=dict(MROPE, mrope_interleaved=True)),
        vision_config=QWEN_VISION,
    ),
    "Qwen3VLMoe": dict(
        text_config=dict(TEXT, head_dim=24, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
                         mlp_only_layers=[1], tie_word_embeddings=False,
                         rope_parameters=dict(MROPE, mrope_interleaved=True)),
        vision_config=QWEN_VISION,
    ),
    "Qwen3VLMoe, as published": dict(
        text_config=dict(TEXT, head_dim=24, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
        vision_config=QWEN_VISION,
    ),
    "Qwen3_5": dict(text_config=dict(TEXT, **DELTA_NETS), vision_config=QWEN_VISION),
    "Qwen3_5Moe": dict(
        text_config=dict(TEXT, **DELTA_NETS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
                         shared_expert_intermediate_size=32),
        vision_config=QWEN_VISION,
    ),
    "Mistral3": dict(
        text_config=dict(TEXT, model_type="mistral", sliding_window=None),
        vision_config=dict(VISION, model_type="pixtral", head_dim=16),
    ),
    "DeepseekVL": dict(text_config=dict(TEXT, model_type="llama"), vision_config=SIGLIP),
    "HyperCLOVAXVisionV2": dict(text_config=dict(TEXT, model_type="hyperclovax"), vision_config=QWEN_VISION),
    "Idefics2": dict(text_config=dict(TEXT, model_type="mistral", sliding_window=None), vision_config=VISION),
    "Idefics3": dict(text_config=dict(TEXT, model_type="llama"), vision_config=VISION),
    "Lfm2Vl": dict(text_config=dict(TEXT, model_type="lfm2", block_auto_adjust_ff_dim=False, layer_types=[
        "conv", "full_attention", "conv"]), vision_config=dict(VISION, model_type="siglip2_vision_model")),
    "LightOnOcr": dict(text_config=dict(TEXT, model_type="qwen3", head_dim=24),
                       vision_config=dict(VISION, model_type="pixtral", head_dim=16)),
    "LlavaNextVideo": dict(text_config=dict(TEXT, model_type="llama"),
                           vision_config=dict(VISION, model_type="clip_vision_model"), image_grid_pinpoints=[[28, 28]]),
    "LlavaOnevision": dict(text_config=dict(TEXT, model_type="qwen2"), vision_config=SIGLIP,
                           image_grid_pinpoints=[[28, 28]]),
    "Ovis2": dict(text_config=dict(TEXT, model_type="qwen2"), vision_config=VISION),
    "SmolVLM": dict(text_config=dict(TEXT, model_type="llama"), vision_config=VISION),
    "VideoLlama3": dict(text_config=dict(TEXT, model_type="qwen2"), vision_config=VISION),
    "VideoLlava": dict(text_config=dict(TEXT, model_type="llama"),
                       vision_config=dict(VISION, model_type="clip_vision_model")),
    "VipLlava": dict(text_config=dict(TEXT, model_type="llama"), vision_feature_layers=[-1],
                     vision_config=dict(VISION, model_type="clip_vision_model")),
}  # fmt: skip


@pytest.mark.parametrize("name", by_default(WRAPPERS, "Gemma3", "Llava", "Llama4"))
def test_a_multimodal_model_gives_its_language_model(name: str, tmp_path: Path) -> None:
    kind = name.partition(",")[0]
    config = getattr(transformers, f"{kind}Config")(**WRAPPERS[name])
    reference = getattr(transformers, f"{kind}ForConditionalGeneration")._from_config(
        config, attn_implementation="eager"
    )
    random_parameters(reference).save_pretrained(tmp_path / "hf")
    if name.endswith("as published"):  # experts' matrices as [in, out]
        file = tmp_path / "hf" / "model.safetensors"
        tensors = {
            key: tensor.transpose(1, 2).contiguous() if "experts" in key else tensor
            for key, tensor in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="only the language model of this .*; the vision tower"):
        import_hf(tmp_path / "hf", tmp_path / "run", show_progress=False)
    ids = torch.randint(1, 151, (2, 48), generator=torch.Generator().manual_seed(3))
    theirs = (
        reference.language_model if kind == "Llama4" else reference
    )  # transformers 5.24's wrapper needs an image
    with torch.no_grad():
        expected, found = theirs(ids).logits, megalith.load(tmp_path / "run").eval()(ids)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    out = export_hf(tmp_path / "run", tmp_path / "out", show_progress=False).path
    with torch.no_grad():
        again = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")(
            ids
        ).logits
    assert (again - expected).abs().max() <= 1e-5 * expected.abs().max()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        certify(tmp_path / "run", tmp_path / "hf", tmp_path / "out")
    whole = export_hf(
        tmp_path / "run", tmp_path / "whole", multimodal=tmp_path / "hf", show_progress=False
    ).path
    for file in ("config.json", "generation_config.json"):
        assert json.loads((whole / file).read_text()) == json.loads((tmp_path / "hf" / file).read_text())
    before, after = (load_file(path / "model.safetensors") for path in (tmp_path / "hf", whole))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_a_language_model_is_written_only_into_its_own_multimodal_model(hf_folder, tmp_path: Path) -> None:
    import_hf(hf_folder("llama"), tmp_path / "run", show_progress=False)
    with pytest.raises(
        ConfigError, match=r"holds \['LlamaForCausalLM'\], which has no language model to replace"
    ):
        export_hf(tmp_path / "run", tmp_path / "out", multimodal=hf_folder("llama"), show_progress=False)
    other = dict(WRAPPERS["Llava"], text_config=dict(TEXT, model_type="llama", num_hidden_layers=2))
    config = transformers.LlavaConfig(**other)
    transformers.LlavaForConditionalGeneration._from_config(config).save_pretrained(tmp_path / "hf")
    with pytest.raises(
        CheckpointError, match=r"does not have the checkpoint's language model: model\.layers\.2\."
    ):
        export_hf(tmp_path / "run", tmp_path / "out", multimodal=tmp_path / "hf", show_progress=False)


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
    with pytest.raises(ConfigError, match="here the layers with RoPE have chunked_attention and the others"):
        FAMILIES["Llama4ForCausalLM"].read_config(tree | {"layer_types": theirs.layer_types[::-1]})


@pytest.mark.parametrize("settings", [
    dict(first_k_dense_replace=3, prefix_dense_sliding_window_pattern=2, sliding_window_pattern=3),
    dict(first_k_dense_replace=1), dict(prefix_dense_sliding_window_pattern=2),
])  # fmt: skip
def test_layers_of_cohere2_moe_follow_their_patterns(settings: dict) -> None:
    theirs = transformers.Cohere2MoeConfig(num_hidden_layers=8, **settings)
    sizes = dict(num_attention_heads=4, vocab_size=8, max_position_embeddings=8)
    tree = dict(settings, num_hidden_layers=8, hidden_size=16, intermediate_size=16, **sizes)
    model = FAMILIES["Cohere2MoeForCausalLM"].read_config(tree)
    assert [window is not None for window in model.windows] == [
        kind == "sliding_attention" for kind in theirs.layer_types
    ]
    assert model.expert_layers == [n for n, kind in enumerate(theirs.mlp_layer_types) if kind == "sparse"]
    rope = [
        transformers.models.cohere2_moe.modeling_cohere2_moe.Cohere2MoeAttention(theirs, n) for n in range(8)
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
