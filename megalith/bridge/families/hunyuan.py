"""Hunyuan, dense (hunyuan_v1_dense) and with experts (hunyuan_v1_moe): Llama with QK norms after RoPE.

The model with experts has them in every layer, with a shared expert of the same width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.experts import EXPERTS
from megalith.bridge.families.llama import ATTENTION_BIAS, IGNORED, SETTINGS, TENSORS
from megalith.bridge.family import Family
from megalith.bridge.rope_settings import Rope, rope_settings
from megalith.bridge.rows import gate_up, same
from megalith.bridge.settings import Field, FixedSettings, Tree, WrittenKeys
from megalith.config import ModelConfig
from megalith.errors import ConfigError


class StretchedRope(Rope):
    """Maps the RoPE settings.

    With "dynamic" scaling, `alpha` multiplies the base by alpha^(d / (d − 2)), where d is the head size.
    """

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        rope = rope_settings(hf_config)
        if rope.get("rope_type", rope.get("type")) == "dynamic" and rope.get("alpha"):
            heads = hf_config.get("num_attention_heads") or 1
            size = hf_config.get("head_dim") or hf_config.get("hidden_size", 0) // heads
            if size <= 2:
                raise ConfigError(
                    f"config.json has rotary scaling with alpha {rope['alpha']} for heads of size {size}, but "
                    "its exponent needs heads larger than 2; correct head_dim"
                )
            base = rope.get("rope_theta") or hf_config.get("rope_theta") or 10000.0
            rope = {"rope_type": "default", "rope_theta": base * rope["alpha"] ** (size / (size - 2))}
            hf_config = {**hf_config, "rope_parameters": rope, "rope_scaling": None}
        return super().read(hf_config)


class TopK:
    """Maps `moe_topk`, a number, or a list that contains the same number for every layer."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        topk = hf_config.get("moe_topk", 1)
        counts = topk if isinstance(topk, list) else [topk]
        if len({repr(count) for count in counts}) != 1 or type(counts[0]) is not int or counts[0] < 1:
            raise ConfigError(
                f"config.json has moe_topk {topk!r}; it must be the number of experts per token, the same for "
                "every layer"
            )
        return {"moe_router_topk": counts[0]}

    def write(self, model: ModelConfig) -> Tree:
        return {"moe_topk": model.moe_router_topk}


# fmt: off
NORMS = {
    "layers.{layer}.self_attention.q_layernorm.weight":
        same("model.layers.{layer}.self_attn.query_layernorm.weight"),
    "layers.{layer}.self_attention.k_layernorm.weight":
        same("model.layers.{layer}.self_attn.key_layernorm.weight"),
}
HUNYUAN = Family(
    architecture="HunYuanDenseV1ForCausalLM",
    model_type="hunyuan_v1_dense",
    defaults={"rms_norm_eps": 1e-5},
    tensors={**TENSORS, **NORMS},
    settings=(
        *[row for row in SETTINGS if not isinstance(row, Rope)],
        StretchedRope(),
        *ATTENTION_BIAS,
        FixedSettings(qk_layernorm=True, qk_layernorm_after_rope=True),
        WrittenKeys(pad_token_id=None),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)


class SharedMLP:
    """Maps `intermediate_size` to the shared expert's width, which equals the width of one expert."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        return {"moe_shared_expert_intermediate_size": hf_config["intermediate_size"]}

    def write(self, model: ModelConfig) -> Tree:
        return {}


SHARED_MLP = {
    "layers.{layer}.mlp.shared_experts.linear_fc1.weight":
        gate_up("model.layers.{layer}.mlp.shared_mlp.gate_proj.weight",
                "model.layers.{layer}.mlp.shared_mlp.up_proj.weight"),
    "layers.{layer}.mlp.shared_experts.linear_fc2.weight":
        same("model.layers.{layer}.mlp.shared_mlp.down_proj.weight"),
}
HUNYUAN_MOE = Family(
    architecture="HunYuanMoEV1ForCausalLM",
    model_type="hunyuan_v1_moe",
    aliases={"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
    defaults=HUNYUAN.defaults,
    tensors={
        **{name: rule for name, rule in HUNYUAN.tensors.items() if ".mlp." not in name},
        **EXPERTS,
        "layers.{layer}.mlp.router.weight":
            same("model.layers.{layer}.mlp.gate.wg.weight"),
        **SHARED_MLP,
    },
    settings=(
        *HUNYUAN.settings,
        Field("num_experts", "num_experts", default=1),
        TopK(),
        SharedMLP(),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on

FAMILIES = (HUNYUAN, HUNYUAN_MOE)
