"""The language model of Molmo 2: Qwen3 or OLMo 2 with fused matrices and different tensor names.

The model has a second embedding, for tokens of images, which belongs to the rest of the multimodal model. transformers
has no class for this language model alone, so an export without the vision tower is Qwen3 or OLMo 2. transformers 5.24
saves the rows of both embeddings in two equal parts; such files are rejected for their shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.llama import QWEN3, SIZES
from megalith.bridge.family import Family
from megalith.bridge.rope_settings import PLAIN, Rope, rope_settings
from megalith.bridge.rows import qkv, same, up_gate
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Tree
from megalith.errors import ConfigError

QK_NORMS = {"qwen3": False, "olmo": True}


class RopeInAllLayers(Rope):
    """Maps the RoPE settings. Rejects RoPE scaling that `rope_scaling_layers` limits to some layers."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        rope, scaled = rope_settings(hf_config), hf_config.get("rope_scaling_layers")
        all_layers = list(range(hf_config["num_hidden_layers"]))
        is_scaled = rope.get("rope_type", rope.get("type")) not in PLAIN
        if is_scaled and scaled is not None and sorted(scaled) != all_layers:
            raise ConfigError(
                f"config.json has rope_scaling_layers {scaled}, but Megalith scales RoPE in all "
                f"{len(all_layers)} layers or in none; use a model without rope_scaling_layers"
            )
        return super().read(hf_config)


# fmt: off
LAYER = "model.transformer.blocks.{layer}."
MOLMO2 = Family(
    architecture="Molmo2TextModel",
    model_type="molmo2_text",
    exported_as=QWEN3.architecture,
    aliases={"qkv_bias": "attention_bias", "layer_norm_eps": "rms_norm_eps"},
    defaults={"num_key_value_heads": 8, "head_dim": 128},
    tensors={
        "embedding.word_embeddings.weight":
            same("model.transformer.wte.embedding"),
        "layers.{layer}.input_layernorm.weight":
            same(LAYER + "attn_norm.weight"),
        "layers.{layer}.post_attention_layernorm.weight":
            same(LAYER + "attn_norm.weight"),
        "layers.{layer}.self_attention.linear_qkv.weight":
            qkv(LAYER + "self_attn.att_proj.weight"),
        "layers.{layer}.self_attention.linear_qkv.bias":
            qkv(LAYER + "self_attn.att_proj.bias"),
        "layers.{layer}.self_attention.q_layernorm.weight":
            same(LAYER + "self_attn.q_norm.weight"),
        "layers.{layer}.self_attention.k_layernorm.weight":
            same(LAYER + "self_attn.k_norm.weight"),
        "layers.{layer}.self_attention.linear_proj.weight":
            same(LAYER + "self_attn.attn_out.weight"),
        "layers.{layer}.pre_mlp_layernorm.weight":
            same(LAYER + "ff_norm.weight"),
        "layers.{layer}.post_mlp_layernorm.weight":
            same(LAYER + "ff_norm.weight"),
        "layers.{layer}.mlp.linear_fc1.weight":
            up_gate(LAYER + "mlp.ff_proj.weight"),
        "layers.{layer}.mlp.linear_fc2.weight":
            same(LAYER + "mlp.ff_out.weight"),
        "final_layernorm.weight":
            same("model.transformer.ln_f.weight"),
        "output_layer.weight":
            same("lm_head.weight"),
    },
    settings=(
        *SIZES,
        RopeInAllLayers(),
        Field("add_qkv_bias", "attention_bias", default=False),
        Field("qk_layernorm_full_width", "qk_norm_type", default="qwen3", values=QK_NORMS),
        Field("norm_placement", "norm_after", default=False, values={False: "pre", True: "post"}),
        FixedSettings(normalization="RMSNorm", swiglu=True, add_bias_linear=False, hidden_dropout=0.0,
                      qk_layernorm=True, untie_embeddings_and_output_weights=True),
        RequiredKeys(hidden_act="silu", tie_word_embeddings=False),
    ),
    tied="lm_head.weight",
    prefix="model.transformer.",
)
# fmt: on

FAMILIES = (MOLMO2,)
