"""Multimodal models: the language model in and out, and the whole model written back with the same bits."""

import json
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from default_cases import by_default
from models.reference import random_parameters
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import megalith
from megalith.bridge.exporter import export_hf
from megalith.bridge.families import family_of
from megalith.bridge.importer import import_hf
from megalith.bridge.model_differences import differences
from megalith.bridge.multimodal import ON_TEXT, language_config, language_name
from megalith.bridge.multimodal import WRAPPERS as WRAPPED
from megalith.bridge.verify import certify
from megalith.config import ModelConfig
from megalith.errors import CheckpointError, ConfigError

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
SAM = dict(VISION, mlp_dim=32, output_channels=8, global_attn_indexes=[0])
AUDIO = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_mel_bins=16,
             max_source_positions=32)  # fmt: skip
QWEN_AUDIO = dict(
    d_model=32, encoder_attention_heads=2, encoder_ffn_dim=32, encoder_layers=1, num_mel_bins=16
)
GRANITE_SPEECH = dict(
    text_config=dict(TEXT, model_type="granite"),
    encoder_config=dict(hidden_dim=32, input_dim=16, num_layers=2, num_heads=2, dim_head=16, output_dim=8,
                        max_pos_emb=8, context_size=4),
    projector_config=dict(model_type="blip_2_qformer", hidden_size=32, intermediate_size=32, num_attention_heads=2,
                          num_hidden_layers=1, encoder_hidden_size=32, vocab_size=8),
)  # fmt: skip
MINICPM = dict(text_config=dict(TEXT, model_type="qwen3_5_text", **DELTA_NETS), vision_config=VISION)
GLM_ROPE = dict(rope_type="default", rope_theta=5e3, partial_rotary_factor=0.5)
GLM_VISION = dict(
    hidden_size=32, intermediate_size=32, num_heads=2, depth=1, out_hidden_size=64, patch_size=14
)
MOLMO2 = dict(
    vision_config=dict(VISION, image_size=[28, 28], head_dim=16),
    adapter_config=dict(hidden_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=16, intermediate_size=32,
                        text_hidden_size=64, vision_feature_layer=[0]),
)  # fmt: skip
OMNI = dict(enable_audio_output=False)
VIBE_ENCODER = dict(model_type="vibevoice_acoustic_tokenizer_encoder", depths=[1, 1], downsampling_ratios=[2],
                    hidden_size=8, num_filters=4)  # fmt: skip
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
    "DeepseekOcr2": dict(
        text_config=dict(TEXT, num_key_value_heads=4, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2,
                         moe_intermediate_size=24, mlp_layer_types=["dense", "sparse", "sparse"]),
        vision_config=dict(sam_config=dict(SAM, downsample_channels=[8, 8]),
                           encoder_config=dict(TEXT, hidden_size=8, num_attention_heads=2)),
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
    "AyaVision": dict(text_config=dict(TEXT, model_type="cohere2", sliding_window=11), vision_config=SIGLIP),
    "Cohere2Vision": dict(text_config=dict(TEXT, model_type="cohere2", sliding_window=11), vision_config=SIGLIP),
    "CohereCompass": dict(
        text_config=dict(TEXT, sliding_window=11, layer_types=["sliding_attention", "full_attention"] * 2,
                         num_hidden_layers=4, rope_parameters=dict(full_attention=None, sliding_attention=dict(
                             rope_type="default", rope_theta=5e3, mrope_section=[2, 3, 3]))),
        vision_config=QWEN_VISION,
    ),
    "DeepseekVLHybrid": dict(text_config=dict(TEXT, model_type="llama"), vision_config=SIGLIP,
                             high_res_vision_config=dict(SAM, model_type="sam_vision_model")),
    "Emu3": dict(
        text_config=dict(TEXT, pad_token_id=0),
        vq_config=dict(codebook_size=8, base_channels=32, channel_multiplier=[1, 1], num_res_blocks=1, hidden_size=32),
        vocabulary_map={"<image>": 1},
    ),
    "Exaone4_5_": dict(
        text_config=dict(TEXT, model_type="exaone4", sliding_window=11,
                         layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
        vision_config=dict(hidden_size=32, intermediate_size=32, num_heads=2, num_key_value_heads=1, depth=1,
                           out_hidden_size=64),
    ),
    "FastVlm": dict(text_config=dict(TEXT, model_type="qwen2"), vision_config=SIGLIP),
    "FunAsrNano": dict(
        text_config=dict(TEXT, model_type="qwen3", head_dim=24),
        audio_config=dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                          num_timestamp_prediction_layers=1, num_mel_bins=8),
        adaptor_config=dict(hidden_size=64, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1,
                            projector_hidden_size=32),
    ),
    "Fuyu": dict(text_config=dict(TEXT, model_type="persimmon"), vocab_size=151, hidden_size=64, patch_size=4),
    "GlmAsr": dict(text_config=dict(TEXT, model_type="llama"), audio_config=dict(AUDIO, num_key_value_heads=2)),
    "GotOcr2": dict(text_config=dict(TEXT, model_type="qwen2"), vision_config=SAM),
    "GraniteSpeech": GRANITE_SPEECH,
    "GraniteSpeechPlus": GRANITE_SPEECH,
    "Janus": dict(
        text_config=dict(TEXT, model_type="llama"), vision_config=dict(VISION, projection_dim=32),
        vq_config=dict(base_channels=32, channel_multiplier=[1, 1], num_embeddings=8, image_token_embed_dim=32,
                       latent_channels=8, projection_dim=32, num_res_blocks=1),
    ),
    "Kimi_K25": dict(
        text_config=dict(TEXT, model_type="deepseek_v3", num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=32,
                         qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=4, n_group=2,
                         num_experts_per_tok=2, topk_group=1, moe_intermediate_size=24, first_k_dense_replace=1,
                         num_nextn_predict_layers=0),
        vision_config=dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1,
                           pos_emb_height=4, pos_emb_width=4),
    ),
    "MiniCPMOcr": MINICPM,
    "MiniCPMV4_6": MINICPM,
    "MiniCPMV4_7": MINICPM,
    "Molmo2": dict(MOLMO2, text_config=dict(TEXT, head_dim=24, additional_vocab_size=8, rope_parameters=dict(
        rope_type="linear", rope_theta=5e3, factor=2.0))),
    "Molmo2, as OLMo 2": dict(MOLMO2, text_config=dict(TEXT, head_dim=16, additional_vocab_size=8, norm_after=True,
                                                      qk_norm_type="olmo", rope_scaling_layers=[1])),
    "MossTranscribeDiarize": dict(text_config=dict(TEXT, model_type="qwen3", head_dim=24), audio_config=AUDIO),
    "OmniASR": dict(
        text_config=dict(TEXT, model_type="llama"),
        audio_config=dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                          conv_dim=[8, 8], conv_kernel=[3, 3], conv_stride=[2, 2], num_conv_pos_embeddings=4,
                          num_conv_pos_embedding_groups=2),
    ),
    "PerceptionLM": dict(text_config=dict(TEXT, model_type="llama"),
                         vision_config=dict(SIGLIP, model_args=dict(embed_dim=32))),
    "QianfanOCR": dict(text_config=dict(TEXT, model_type="qwen3", head_dim=24),
                       vision_config=dict(VISION, image_size=[28, 28], patch_size=[14, 14])),
    "AudioFlamingo3": dict(text_config=dict(TEXT, model_type="qwen2"), audio_config=AUDIO),
    "MusicFlamingo": dict(text_config=dict(TEXT, model_type="qwen2"),
                          audio_config=dict(AUDIO, model_type="audioflamingo3_encoder")),
    "Qwen2Audio": dict(text_config=dict(TEXT, model_type="qwen2"),
                       audio_config=dict(QWEN_AUDIO, max_source_positions=32)),
    "Qwen3ASR": dict(text_config=dict(TEXT, model_type="qwen3", head_dim=24),
                     audio_config=dict(QWEN_AUDIO, downsample_hidden_size=8, output_dim=64)),
    "VibeVoiceAsr": dict(text_config=dict(TEXT, model_type="qwen2"), acoustic_tokenizer_encoder_config=VIBE_ENCODER,
                         semantic_tokenizer_encoder_config=VIBE_ENCODER),
    "Voxtral": dict(text_config=dict(TEXT, model_type="llama"), audio_config=AUDIO),
    "Qwen2_5Omni": dict(OMNI, thinker_config=dict(
        text_config=dict(TEXT, rope_parameters=MROPE), audio_config=dict(QWEN_AUDIO, output_dim=64),
        vision_config=QWEN_VISION)),
    "Qwen2_5OmniThinker": dict(text_config=dict(TEXT, tie_word_embeddings=False, rope_parameters=MROPE),
                               audio_config=dict(QWEN_AUDIO, output_dim=64), vision_config=QWEN_VISION),
    "Qwen3OmniMoe": dict(OMNI, thinker_config=dict(
        text_config=dict(TEXT, head_dim=24, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
                         rope_parameters=dict(MROPE, mrope_interleaved=True)),
        audio_config=dict(QWEN_AUDIO, downsample_hidden_size=8, output_dim=64), vision_config=QWEN_VISION)),
    "Glm4v": dict(text_config=dict(TEXT, rope_parameters=dict(GLM_ROPE, mrope_section=[1, 2, 1])),
                  vision_config=GLM_VISION),
    "Glm46V": dict(text_config=dict(TEXT, model_type="glm4v_text", rope_parameters=dict(
        GLM_ROPE, mrope_section=[1, 2, 1])), vision_config=dict(GLM_VISION, model_type="glm4v_vision")),
    "GlmOcr": dict(text_config=dict(TEXT, rope_parameters=dict(MROPE, mrope_section=[4, 2, 2])),
                   vision_config=GLM_VISION),
    "Glm4vMoe": dict(
        text_config=dict(TEXT, head_dim=16, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
                         first_k_dense_replace=1, n_group=2, topk_group=1,
                         rope_parameters=dict(GLM_ROPE, mrope_section=[1, 2, 1])),
        vision_config=GLM_VISION,
    ),
    "PaddleOCRVL": dict(text_config=dict(TEXT, head_dim=16, rope_parameters=MROPE), vision_config=VISION),
    "HunYuanVL": dict(
        text_config=dict(TEXT, head_dim=16, pad_token_id=0, rope_parameters=dict(
            rope_type="dynamic", rope_theta=1e4, alpha=1000.0, factor=1.0, mrope_section=[2, 2, 2, 2])),
        vision_config=dict(VISION, text_hidden_size=64, spatial_merge_size=1),
    ),
    "Granite4Vision": dict(text_config=dict(TEXT, embedding_multiplier=3.0, residual_multiplier=0.5),
                           vision_config=dict(SIGLIP, hidden_size=64), downsample_rate="1/2",
                           deepstack_layer_map=[[0, 0]]),
    "GraniteDocling": dict(text_config=dict(TEXT, pad_token_id=0), vision_config=dict(VISION, out_hidden_size=64)),
}  # fmt: skip


@pytest.mark.parametrize("name", by_default(WRAPPERS, "Gemma3", "Llava", "Kimi_K25"))
def test_a_multimodal_model_gives_its_language_model(name: str, tmp_path: Path) -> None:
    kind = name.partition(",")[0]
    config = getattr(transformers, f"{kind}Config")(**WRAPPERS[name])
    suffix = "ForCausalLM" if kind == "Fuyu" else "ForConditionalGeneration"
    reference = getattr(transformers, kind + suffix)._from_config(config, attn_implementation="eager")
    random_parameters(reference).save_pretrained(tmp_path / "hf")
    if kind == "Qwen2_5Omni":  # which transformers does not load without its voices
        torch.save({}, tmp_path / "hf" / "spk_dict.pt")
    if kind == "Molmo2":  # transformers 5.24 divides the embedding in the middle
        file = tmp_path / "hf" / "model.safetensors"
        tensors = load_file(file)
        names = [f"model.transformer.wte.{part}" for part in ("embedding", "new_embedding")]
        rows = torch.cat([tensors[name] for name in names])
        tensors |= {part: rows_.clone() for part, rows_ in zip(names, rows.split([151, 8]))}
        save_file(tensors, file, metadata={"format": "pt"})
    if name.endswith("as published"):  # experts' matrices as [in, out]
        file = tmp_path / "hf" / "model.safetensors"
        tensors = {
            key: tensor.transpose(1, 2).contiguous() if "experts" in key else tensor
            for key, tensor in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="only the language model of this .*; the tower for images"):
        import_hf(tmp_path / "hf", tmp_path / "run", show_progress=False)
    if kind in ("AyaVision", "Cohere2Vision"):  # transformers 5.24's wrapper does not scale logits
        reference.lm_head.weight = torch.nn.Parameter(
            reference.lm_head.weight * config.text_config.logit_scale
        )
    ids = torch.randint(1, 151, (2, 48), generator=torch.Generator().manual_seed(3))
    theirs = getattr(
        reference, "thinker", reference.language_model if kind == "Llama4" else reference
    )  # transformers 5.24's wrapper needs an image
    with torch.no_grad():
        expected, found = theirs(ids).logits, megalith.load(tmp_path / "run").eval()(ids)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    out = export_hf(tmp_path / "run", tmp_path / "out", show_progress=False).path
    with torch.no_grad():
        class_name = json.loads((out / "config.json").read_text())["architectures"][0]
        if model_class := getattr(transformers, class_name, None):
            again = model_class.from_pretrained(out, attn_implementation="eager")(ids).logits
        else:  # DeepSeek-MoE, whose class is in the model's own folder
            again = megalith.load(out)(ids)
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


def test_names_of_a_published_kimi_k25_and_of_one_that_transformers_saved_are_the_same() -> None:
    for layer in ("layers", "blocks"):
        name = language_name(f"language_model.model.{layer}.0.input_layernorm.weight")
        assert name == "model.layers.0.input_layernorm.weight"
    assert language_name("vision_tower.encoder.blocks.0.norm0.weight") is None
    assert language_name("mm_projector.pre_norm.weight") is None


@pytest.mark.parametrize("kind", sorted(ON_TEXT.keys() - {"kimi_k2"}))
def test_a_key_that_text_config_leaves_out_has_the_default_of_transformers(kind: str) -> None:
    theirs = json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
    wrapper = next(name for name, text in WRAPPED.items() if text == kind)

    def read(text: dict) -> ModelConfig:
        config = language_config({"architectures": [wrapper], "text_config": text})
        return family_of(config, "the test").read_config(config)

    whole = read(theirs)
    for key in theirs.keys() - {"model_type"}:
        try:
            without = read({name: value for name, value in theirs.items() if name != key})
        except ConfigError as error:
            assert f"config.json has no {key}, which determines" in str(error)
        else:
            assert differences(without, whole) == [], key


def test_dropout_of_emu3_is_that_of_attention_and_of_residual_branches() -> None:
    tree = json.loads(
        transformers.Emu3TextConfig(**TEXT, attention_dropout=0.3, pad_token_id=0).to_json_string()
    )
    family = family_of(tree, "the test")
    model = family.read_config(tree)
    assert model.attention_dropout == model.hidden_dropout == 0.3
    assert differences(family.read_config(family.write_config(model)), model) == []
    del tree["attention_dropout"]
    assert family.read_config(tree).hidden_dropout == transformers.Emu3TextConfig().attention_dropout == 0.1


def test_biases_that_one_language_model_has_and_its_family_does_not_are_refused() -> None:
    text = {"model_type": "paddleocr_vl_text", "use_bias": True}
    with pytest.raises(
        ConfigError, match=r"text_config\.use_bias True, but paddleocr_vl_text is supported only"
    ):
        language_config({"architectures": ["PaddleOCRVLForConditionalGeneration"], "text_config": text})
