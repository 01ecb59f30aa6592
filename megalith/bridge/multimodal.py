"""Extracts the language model of a multimodal transformers model: its configuration and its tensors.

A wrapper's config.json contains the language model's under `text_config`. Its files also contain the tensors of a
vision or audio tower and a projector. An import ignores them; an export can take them from the wrapper's folder
(wrapper.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from megalith.errors import ConfigError

# For each wrapper the model_type of its language model where text_config leaves it out.
WRAPPERS = {
    "AriaForConditionalGeneration": "aria_text",
    "AudioFlamingo3ForConditionalGeneration": "qwen2",
    "AyaVisionForConditionalGeneration": "cohere2",
    "Cohere2VisionForConditionalGeneration": "cohere2",
    "CohereCompassForConditionalGeneration": "cohere_compass_text",
    "DeepseekOcr2ForConditionalGeneration": "deepseek_ocr2_text",
    "DeepseekVLForConditionalGeneration": "llama",
    "DeepseekVLHybridForConditionalGeneration": "llama",
    "Emu3ForConditionalGeneration": "emu3_text_model",
    "Exaone4_5_ForConditionalGeneration": "exaone4",
    "FastVlmForConditionalGeneration": "qwen2",
    "FunAsrNanoForConditionalGeneration": "qwen3",
    "FuyuForCausalLM": "persimmon",
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Glm46VForConditionalGeneration": "glm4v_text",
    "Glm4vForConditionalGeneration": "glm4v_text",
    "Glm4vMoeForConditionalGeneration": "glm4v_moe_text",
    "GlmAsrForConditionalGeneration": "llama",
    "GlmOcrForConditionalGeneration": "glm_ocr_text",
    "GotOcr2ForConditionalGeneration": "qwen2",
    "Granite4VisionForConditionalGeneration": "granite4_vision_text",
    "GraniteDoclingForConditionalGeneration": "granite_docling_text",
    "GraniteSpeechForConditionalGeneration": "granite",
    "GraniteSpeechPlusForConditionalGeneration": "granite",
    "HunYuanVLForConditionalGeneration": "hunyuan_vl_text",
    "HyperCLOVAXVisionV2ForConditionalGeneration": "hyperclovax",
    "Idefics2ForConditionalGeneration": "mistral",
    "Idefics3ForConditionalGeneration": "llama",
    "InternVLForConditionalGeneration": "qwen2",
    "JanusForConditionalGeneration": "llama",
    "KimiK25ForConditionalGeneration": "deepseek_v3",
    "Kimi_K25ForConditionalGeneration": "deepseek_v3",
    "Lfm2VlForConditionalGeneration": "lfm2",
    "LightOnOcrForConditionalGeneration": "qwen3",
    "Llama4ForConditionalGeneration": "llama4_text",
    "LlavaForConditionalGeneration": "llama",
    "LlavaNextForConditionalGeneration": "llama",
    "LlavaNextVideoForConditionalGeneration": "llama",
    "LlavaOnevisionForConditionalGeneration": "qwen2",
    "MiniCPMOcrForConditionalGeneration": "qwen3_5_text",
    "MiniCPMV4_6ForConditionalGeneration": "qwen3_5_text",
    "MiniCPMV4_7ForConditionalGeneration": "qwen3_5_text",
    "Mistral3ForConditionalGeneration": "mistral",
    "Molmo2ForConditionalGeneration": "molmo2_text",
    "MossTranscribeDiarizeForConditionalGeneration": "qwen3",
    "MusicFlamingoForConditionalGeneration": "qwen2",
    "OmniASRForConditionalGeneration": "llama",
    "Ovis2ForConditionalGeneration": "qwen2",
    "PaddleOCRVLForConditionalGeneration": "paddleocr_vl_text",
    "PerceptionLMForConditionalGeneration": "llama",
    "QianfanOCRForConditionalGeneration": "qwen3",
    "Qwen2AudioForConditionalGeneration": "qwen2",
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5OmniForConditionalGeneration": "qwen2_5_omni_text",
    "Qwen2_5OmniModel": "qwen2_5_omni_text",
    "Qwen2_5OmniThinkerForConditionalGeneration": "qwen2_5_omni_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen3ASRForConditionalGeneration": "qwen3",
    "Qwen3OmniMoeForConditionalGeneration": "qwen3_omni_moe_text",
    "Qwen3OmniMoeThinkerForConditionalGeneration": "qwen3_omni_moe_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
    "SmolVLMForConditionalGeneration": "llama",
    "VibeVoiceAsrForConditionalGeneration": "qwen2",
    "VideoLlama3ForConditionalGeneration": "qwen2",
    "VideoLlavaForConditionalGeneration": "llama",
    "VipLlavaForConditionalGeneration": "llama",
    "VoxtralForConditionalGeneration": "llama",
}
QWEN2_VL = {
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 32768,
    "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64,
    "vocab_size": 152064,
}  # fmt: skip
QWEN2_OMNI = {
    "num_key_value_heads": 4, "rope_theta": 1e6, "max_position_embeddings": 32768, "hidden_size": 3584,
    "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "vocab_size": 152064,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_OMNI = {
    "num_key_value_heads": 4, "rope_theta": 1e6, "max_position_embeddings": 32768, "hidden_size": 2048,
    "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "vocab_size": 3584,
    "norm_topk_prob": True,
}  # fmt: skip
GLM4V = {"partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5}
GRANITE_DOCLING = {
    "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "embedding_multiplier": 12.0, "attention_multiplier": 0.015625,
    "residual_multiplier": 0.263, "logits_scaling": 4.0, "max_position_embeddings": 32768, "hidden_size": 1024,
    "intermediate_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "vocab_size": 133800,
    "tie_word_embeddings": True,
}  # fmt: skip
PADDLE_OCR = {
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 131072,
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18, "num_attention_heads": 16,
    "vocab_size": 103424, "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip
# Language models that compute as another family's on text: their model_type → that family's, their defaults, and values
# that are fixed in their code, whatever config.json says.
ON_TEXT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "glm4v_text": ("glm4", GLM4V, {"attention_bias": True}),
    "glm4v_moe_text": (
        "glm4_moe",
        {"attention_bias": True},
        {"use_qk_norm": False, "num_nextn_predict_layers": 0},
    ),
    "glm_ocr_text": ("glm4", {**GLM4V, "num_key_value_heads": 8}, {"attention_bias": False}),
    "granite4_vision_text": ("granite", {}, {}),
    "granite_docling_text": ("granite", GRANITE_DOCLING, {}),
    "hunyuan_vl_text": ("hunyuan_v1_dense", {"tie_word_embeddings": True}, {}),
    "kimi_k2": ("deepseek_v3", {}, {}),
    "paddleocr_vl_text": ("llama", PADDLE_OCR, {"attention_bias": False, "mlp_bias": False}),
    "qwen2_vl_text": ("qwen2", QWEN2_VL, {}),
    "qwen2_5_vl_text": ("qwen2", QWEN2_VL, {}),
    "qwen2_5_omni_text": ("qwen2", QWEN2_OMNI, {}),
    "qwen3_omni_moe_text": ("qwen3_moe", QWEN3_OMNI, {}),
    "qwen3_vl_text": ("qwen3", {"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 5e5}, {}),
}
# Positions in time, height and width (M-RoPE), which are equal on text.
MROPE = ("mrope_section", "mrope_interleaved", "xdrope_section")
TOP_KEYS = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")  # what the wrapper decides
THINKER = "thinker_config"  # of models that also speak, which have a thinker and a talker
LANGUAGE = ("language_model.", "text_model.")
LEFT_OUT = (
    "vision_tower.", "vision_model.", "vision_encoder.", "image_tower.", "video_tower.", "visual.", "vqmodel.",
    "visual_embeddings_table.", "high_res_vision_", "vision_embed_tokens.", "image_newline", "generation_",
    "audio_tower.", "encoder.", "acoustic_tokenizer_encoder.", "semantic_tokenizer_encoder.",
    "multi_modal_projector.", "mm_projector.", "vision_projection.", "vision_projector.", "projector.", "connector.",
    "aligner.", "merger.", "mlp1.", "mlp_AR.", "vit.", "layerwise_projectors.", "spatial_projectors.",
     "qformer.", "query_tokens", "language_projection.",
    "talker.", "token2wav.", "code2wav.", "sam_model.", "qwen2_model.", "view_sep", "vision_backbone.",
    "transformer.wte.new_embedding",
)  # fmt: skip
# Names that transformers 5.24 saves of Kimi-K2.5's and Qianfan-OCR's language models, as if they were vision towers.
SAVED_AS_VISION = {"model.blocks.": "model.layers.", "model.encoder.layers.": "model.layers."}
T = TypeVar("T")


def wrapper_of(config: Mapping[str, Any]) -> str | None:
    """Return the class of a multimodal model that can be imported, otherwise None."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) and name in WRAPPERS else None


def language_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's config.json, or `config` itself if the model is not multimodal.

    Raises ConfigError for a multimodal config.json without a text_config.
    """
    wrapper = wrapper_of(config)
    if wrapper is None:
        return config
    inner = thinker_of(config)
    text = inner.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError(
            f"config.json of {wrapper} has no text_config, which is its language model; fetch it again"
        )
    top = {key: both[key] for both in (config, inner) for key in TOP_KEYS if both.get(key) is not None}
    without = {key: value for key, value in text.items() if key != "architectures"}
    return _on_text({"model_type": WRAPPERS[wrapper], **without, **top})


def with_text_config(config: dict[str, Any], text: dict[str, Any], **top: Any) -> dict[str, Any]:
    """Return a multimodal model's config.json with another text_config.

    Args:
        config: the multimodal model's config.json.
        text: the language model's configuration.
        top: other keys to change at the top level.
    """
    changed = {**thinker_of(config), "text_config": text, **top}
    return {**config, THINKER: changed} if THINKER in config else changed


def thinker_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the object of config.json that contains text_config. In models that also generate speech, this is the
    thinker's.
    """
    thinker = config.get(THINKER)
    return thinker if isinstance(thinker, dict) else config


def _on_text(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a text-only family that computes the same for text as this language model."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if isinstance(rope, dict) and any(name in rope for name in MROPE):
            kept = {name: value for name, value in rope.items() if name not in MROPE}
            kinds = {name: "default" for name in ("type", "rope_type") if kept.get(name) == "mrope"}
            config = {**config, key: {**kept, **kinds}}
    if config["model_type"] not in ON_TEXT:
        return config
    if config.get("use_bias"):
        raise ConfigError(
            f"config.json has text_config.use_bias {config['use_bias']!r}, but {config['model_type']} is supported "
            "only with false; use a model without biases"
        )
    family, defaults, fixed = ON_TEXT[config["model_type"]]
    size, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if family == "glm4" and type(size) is type(heads) is int and heads > 0:  # its own default is 128
        defaults = {**defaults, "head_dim": size // heads}
    return {**defaults, **config, **fixed, "model_type": family}


def language_name(name: str) -> str | None:
    """Map a tensor name of a multimodal checkpoint to its name in a checkpoint of only the language model.

    None for tensors of other parts, such as the vision encoder.
    """
    name = name.removeprefix("thinker.")
    plain = name.removeprefix("model.")
    for prefix in LANGUAGE:
        if plain.startswith(prefix):
            inner = plain.removeprefix(prefix)
            for saved, original in SAVED_AS_VISION.items():
                if inner.startswith(saved):
                    inner = original + inner.removeprefix(saved)
            return inner if inner.startswith(("model.", "lm_head.")) else f"model.{inner}"
    return None if plain.startswith(LEFT_OUT) else name


def language_tensors(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the tensors of the language model, under the names of `language_name`."""
    return {plain: tensor for name, tensor in tensors.items() if (plain := language_name(name)) is not None}
