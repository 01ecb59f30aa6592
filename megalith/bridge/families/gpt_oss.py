"""gpt-oss: experts in every layer, one attention sink per head, a window in every second layer.

One tensor [experts, in, out] has the gates and ups of all experts, which alternate as in Megalith. The published files
store it in MXFP4 (quantized.py). All linears except the head have biases, and so does the router.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.llama import IGNORED, SIZES, TENSORS, UNTIED
from megalith.bridge.family import Family
from megalith.bridge.rope_settings import Rope, rope_settings
from megalith.bridge.rows import Rule, same, stacked
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Tree, WindowsByLayer
from megalith.config import ModelConfig

YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def stacked_experts(name: str) -> Rule:
    """Return the mapping rule of all experts' matrices, stored as [experts, in, out], or of their biases."""
    return stacked(same(name), transposed=True)


class RopeWithDefaults:
    """Maps the RoPE settings, with a default scaling and base if config.json has none."""

    def __init__(self, scaling: Mapping[str, Any], base: float):
        self._scaling, self._base = scaling, base

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        rope = rope_settings(hf_config) or dict(self._scaling)
        base = rope.get("rope_theta") or hf_config.get("rope_theta") or self._base
        return Rope().read(
            {**hf_config, "rope_parameters": {**rope, "rope_theta": base}, "rope_scaling": None}
        )

    def write(self, model: ModelConfig) -> Tree:
        tree = Rope().write(model)
        scaling = tree.pop("rope_scaling") or {"rope_type": "default"}
        return {"rope_parameters": {**scaling, "rope_theta": tree["rope_theta"]}}


# fmt: off
GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    aliases={"num_experts": "num_local_experts"},
    defaults={"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5},
    tensors={
        **TENSORS,
        "layers.{layer}.self_attention.softmax_offset.weight":
            same("model.layers.{layer}.self_attn.sinks"),
        "layers.{layer}.mlp.router.weight":
            same("model.layers.{layer}.mlp.router.weight"),
        "layers.{layer}.mlp.router.bias":
            same("model.layers.{layer}.mlp.router.bias"),
        "layers.{layer}.mlp.experts.linear_fc1.weight":
            stacked_experts("model.layers.{layer}.mlp.experts.gate_up_proj"),
        "layers.{layer}.mlp.experts.linear_fc1.bias":
            stacked_experts("model.layers.{layer}.mlp.experts.gate_up_proj_bias"),
        "layers.{layer}.mlp.experts.linear_fc2.weight":
            stacked_experts("model.layers.{layer}.mlp.experts.down_proj"),
        "layers.{layer}.mlp.experts.linear_fc2.bias":
            stacked_experts("model.layers.{layer}.mlp.experts.down_proj_bias"),
    },
    settings=(
        *SIZES,
        UNTIED,
        RopeWithDefaults(YARN, 150000.0),
        WindowsByLayer(every=2, default=128),
        Field("num_experts", "num_local_experts", default=128),
        Field("moe_router_topk", "num_experts_per_tok", default=4),
        Field("add_qkv_bias", "attention_bias", default=True),
        Field("add_proj_bias", "attention_bias", default=True),
        Field("activation_func_clamp_value", "swiglu_limit", default=7.0),
        FixedSettings(normalization="RMSNorm", gated_linear_unit=True, activation="quick_gelu", glu_linear_offset=1.0,
             add_bias_linear=False, add_mlp_bias=True, add_router_bias=True, softmax_type="learnable",
             hidden_dropout=0.0),
        RequiredKeys(hidden_act="silu", swiglu_alpha=1.702),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on


FAMILIES = (GPT_OSS,)
