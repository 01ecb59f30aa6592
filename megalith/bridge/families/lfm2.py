"""LFM2: most layers are short convolutions, the others attention with QK norms.

In LFM2-MoE, all but the first layers have experts, with sigmoid scores and an expert bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.experts import SigmoidScores
from megalith.bridge.families.llama import IGNORED, SIZES, TENSORS, TIED
from megalith.bridge.families.more_experts import DenseLayers
from megalith.bridge.family import Family
from megalith.bridge.mamba_rows import MixerLayers
from megalith.bridge.rope_settings import Rope
from megalith.bridge.rows import RowRun, Rule, gate_up, same
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Tree, WrittenKeys
from megalith.config import ModelConfig

WIDTH = Field("ffn_hidden_size", "intermediate_size")


class AdjustedWidth:
    """Maps `intermediate_size` to the MLP's width.

    With `block_auto_adjust_ff_dim`, the width is two thirds of it, rounded up.
    """

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        width = hf_config.get("block_ff_dim") or WIDTH.read(hf_config)["ffn_hidden_size"]
        if hf_config.get("block_auto_adjust_ff_dim", True):
            width = int(2 * width / 3)
            factor, multiple = (
                hf_config.get("block_ffn_dim_multiplier", 1.0),
                hf_config.get("block_multiple_of", 256),
            )
            if factor is not None:
                width = multiple * -(-int(factor * width) // multiple)
        return {"ffn_hidden_size": width}

    def write(self, model: ModelConfig) -> Tree:
        return {"intermediate_size": model.ffn_size, "block_auto_adjust_ff_dim": False}


class AttentionLayers(MixerLayers):
    """Maps `layer_types`, or else `full_attn_idxs`, to the layers with attention."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        layers, attention = range(hf_config["num_hidden_layers"]), hf_config.get("full_attn_idxs")
        if hf_config.get("layer_types") is None and attention is not None:
            kinds = [("conv", "full_attention")[layer in attention] for layer in layers]
            hf_config = {**hf_config, "layer_types": kinds}
        return super().read(hf_config)


def _by_unit(model: ModelConfig, rows: int) -> list[RowRun]:
    """Order rows by unit: B, C, x. Hugging Face has all B, all C, all x."""
    return [RowRun(part, 0, part, rows // 3, step=3) for part in range(3)]


# fmt: off
LAYER = "model.layers.{layer}."
LFM2_TENSORS = {
    **{name: Rule(tuple(n.replace("o_proj", "out_proj") for n in rule.names), rule.order)
       for name, rule in TENSORS.items()},
    "layers.{layer}.input_layernorm.weight":
        same(LAYER + "operator_norm.weight"),
    "layers.{layer}.pre_mlp_layernorm.weight":
        same(LAYER + "ffn_norm.weight"),
    "layers.{layer}.self_attention.q_layernorm.weight":
        same(LAYER + "self_attn.q_layernorm.weight"),
    "layers.{layer}.self_attention.k_layernorm.weight":
        same(LAYER + "self_attn.k_layernorm.weight"),
    "layers.{layer}.self_attention.linear_bcx.weight":
        Rule((LAYER + "conv.in_proj.weight",), _by_unit),
    "layers.{layer}.self_attention.linear_bcx.bias":
        Rule((LAYER + "conv.in_proj.bias",), _by_unit),
    "layers.{layer}.self_attention.conv.weight":
        same(LAYER + "conv.conv.weight"),
    "layers.{layer}.self_attention.conv.bias":
        same(LAYER + "conv.conv.bias"),
    "layers.{layer}.self_attention.linear_out.weight":
        same(LAYER + "conv.out_proj.weight"),
    "layers.{layer}.self_attention.linear_out.bias":
        same(LAYER + "conv.out_proj.bias"),
    "layers.{layer}.mlp.linear_fc1.weight":
        gate_up(LAYER + "feed_forward.w1.weight", LAYER + "feed_forward.w3.weight"),
    "layers.{layer}.mlp.linear_fc2.weight":
        same(LAYER + "feed_forward.w2.weight"),
    "final_layernorm.weight":
        same("model.embedding_norm.weight"),
}
LFM2_SETTINGS = (
    *[row for row in SIZES
      if row.setting not in ("ffn_hidden_size", "layernorm_epsilon", "attention_dropout", "kv_channels")],
    Field("layernorm_epsilon", "norm_eps", default=1e-5),
    TIED,
    Rope(),
    Field("linear_conv_kernel_dim", "conv_L_cache", default=3),
    Field("short_conv_bias", "conv_bias", default=False),
    FixedSettings(normalization="RMSNorm", swiglu=True, add_bias_linear=False, hidden_dropout=0.0,
                  attention_dropout=0.0, qk_layernorm=True),
    WrittenKeys(pad_token_id=None),
)
LFM2 = Family(
    architecture="Lfm2ForCausalLM",
    model_type="lfm2",
    defaults={"num_key_value_heads": 8, "rope_theta": 1e6},
    aliases={"tie_embedding": "tie_word_embeddings"},
    tensors=LFM2_TENSORS,
    settings=(*LFM2_SETTINGS, AdjustedWidth(), AttentionLayers("conv", "short_conv", default="full_attention")),
    tied="lm_head.weight",
    ignored=IGNORED,
)
LFM2_MOE = Family(
    architecture="Lfm2MoeForCausalLM",
    model_type="lfm2_moe",
    defaults={"num_key_value_heads": 8, "rope_theta": 1e6, "num_experts_per_tok": 4},
    aliases={"tie_embedding": "tie_word_embeddings"},
    tensors={
        **LFM2_TENSORS,
        "layers.{layer}.mlp.router.weight":
            same(LAYER + "feed_forward.gate.weight"),
        "layers.{layer}.mlp.router.expert_bias":
            same(LAYER + "feed_forward.expert_bias"),
        "layers.{layer}.mlp.experts.linear_fc1.weight":
            gate_up(LAYER + "feed_forward.experts.{expert}.w1.weight",
                    LAYER + "feed_forward.experts.{expert}.w3.weight"),
        "layers.{layer}.mlp.experts.linear_fc2.weight":
            same(LAYER + "feed_forward.experts.{expert}.w2.weight"),
    },
    settings=(
        *LFM2_SETTINGS,
        WIDTH,
        MixerLayers("conv", "short_conv"),
        Field("num_experts", "num_experts", default=32),
        Field("moe_router_topk", "num_experts_per_tok", default=4),
        Field("moe_ffn_hidden_size", "moe_intermediate_size", default=1792),
        Field("moe_router_topk_scaling_factor", "routed_scaling_factor", default=1.0),
        DenseLayers(default=2),
        SigmoidScores(),
        RequiredKeys(use_expert_bias=True, norm_topk_prob=True),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on


FAMILIES = (LFM2, LFM2_MOE)
