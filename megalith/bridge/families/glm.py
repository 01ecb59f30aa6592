"""GLM of Zhipu, and MoE families with the same layers.

GLM-4 (glm): partial interleaved RoPE, QKV biases, one matrix for gate and up. GLM-4-0414 (glm4) also has norms after
attention and MLP.

GLM-4.5 to 4.7 (glm4_moe): DeepSeek-V3's experts with grouped-query attention, partial RoPE in halves and optional QK
norms. GLM-4.7-Flash (glm4_moe_lite) has latent attention. Solar-Open (solar_open) has experts in every layer and RoPE
on whole heads.

dots.llm1 (dots1): the same experts with Qwen3's attention, and windows in the last layers of some models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.experts import (
    DEEPSEEK_V3,
    EXPERTS,
    ROUTED_EXPERTS,
    SHARED,
    DenseFirst,
    MlpLayerTypes,
    RouterGroups,
    SharedExperts,
    SigmoidScores,
)
from megalith.bridge.families.llama import ATTENTION_BIAS, IGNORED, QK_NORMS, SETTINGS, SIZES, TENSORS, UNTIED
from megalith.bridge.family import Family
from megalith.bridge.mtp_rows import MTP, MTP_COPIES, MTPLayers
from megalith.bridge.rope_settings import PartialRope, Rope
from megalith.bridge.rows import gate_up, same
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Tree, WindowsByLayer, WrittenKeys

# fmt: off
GLM = Family(
    architecture="GlmForCausalLM",
    model_type="glm",
    defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7},
    tensors={
        **TENSORS,
        "layers.{layer}.mlp.linear_fc1.weight":
            gate_up("model.layers.{layer}.mlp.gate_up_proj.weight"),
    },
    settings=(
        *SIZES,
        UNTIED,
        PartialRope(0.5),
        Field("add_qkv_bias", "attention_bias", default=True),
        FixedSettings(normalization="RMSNorm", swiglu=True, add_bias_linear=False, hidden_dropout=0.0,
                      rotary_interleaved=True),
        RequiredKeys(hidden_act="silu"),
        WrittenKeys(pad_token_id=None),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

GLM4 = Family(
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    defaults=GLM.defaults,
    tensors={
        **GLM.tensors,
        "layers.{layer}.post_attention_layernorm.weight":
            same("model.layers.{layer}.post_self_attn_layernorm.weight"),
        "layers.{layer}.post_mlp_layernorm.weight":
            same("model.layers.{layer}.post_mlp_layernorm.weight"),
    },
    settings=(*GLM.settings, FixedSettings(norm_placement="sandwich")),
    tied="lm_head.weight",
    ignored=IGNORED,
)

WITHOUT_ROPE = tuple(row for row in SETTINGS if not isinstance(row, Rope))
SIGMOID_EXPERTS = (
    *ROUTED_EXPERTS,
    RouterGroups(method=False),
    SigmoidScores(),
)
GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "n_shared_experts": 1},
    tensors={**TENSORS, **EXPERTS, **SHARED, **QK_NORMS, **MTP},
    mtp_copies=MTP_COPIES,
    settings=(
        *WITHOUT_ROPE,
        PartialRope(0.5),
        *SIGMOID_EXPERTS,
        DenseFirst(),
        SharedExperts(absent=0),
        Field("add_qkv_bias", "attention_bias", default=False),
        Field("qk_layernorm", "use_qk_norm", default=False),
        RequiredKeys(norm_topk_prob=True),
        MTPLayers(default=1),
    ),
    tied="lm_head.weight",
    ignored=(*IGNORED, r"layers\.(46|92)\."),  # of the published models' MTP layers, if config.json says 0
)

SOLAR_OPEN = Family(
    architecture="SolarOpenForCausalLM",
    model_type="solar_open",
    aliases={"num_local_experts": "n_routed_experts"},
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "n_shared_experts": 1,
              "rope_theta": 1e6},
    tensors={**TENSORS, **EXPERTS, **SHARED},
    settings=(
        *[row for row in SETTINGS if getattr(row, "setting", None) != "ffn_hidden_size"],
        Field("ffn_hidden_size", "intermediate_size", default=None),
        *SIGMOID_EXPERTS,
        SharedExperts(absent=0),
        Field("add_qkv_bias", "attention_bias", default=False),
        RequiredKeys(norm_topk_prob=True),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

GLM4_MOE_LITE = Family(
    architecture="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    aliases={"num_local_experts": "n_routed_experts"},
    defaults={"rms_norm_eps": 1e-5, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256,
              "n_shared_experts": 1, "routed_scaling_factor": 1.8},
    tensors=DEEPSEEK_V3.tensors,
    mtp_copies=MTP_COPIES,
    settings=(
        *[row for row in DEEPSEEK_V3.settings if not isinstance(row, DenseFirst | SharedExperts | MTPLayers)],
        MTPLayers(),
        MlpLayerTypes(dense=1),
        SharedExperts(absent=0),
    ),
    tied="lm_head.weight",
    ignored=(*IGNORED, r"layers\.47\."),
)
# fmt: on


class LastWindows(WindowsByLayer):
    """Maps windows to layer `max_window_layers` and all later layers, unless `layer_types` lists the layers."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        if hf_config.get("layer_types") is None:
            first, count = hf_config.get("max_window_layers"), hf_config["num_hidden_layers"]
            first = 62 if first is None else first
            kinds = [("full_attention", "sliding_attention")[number >= first] for number in range(count)]
            hf_config = {**hf_config, "layer_types": kinds}
        return super().read(hf_config)


# fmt: off
DOTS1 = Family(
    architecture="Dots1ForCausalLM",
    model_type="dots1",
    aliases={"num_local_experts": "n_routed_experts"},
    tensors={**TENSORS, **EXPERTS, **SHARED, **QK_NORMS},
    settings=(
        *SETTINGS,
        *ATTENTION_BIAS,
        *SIGMOID_EXPERTS,
        DenseFirst(),
        SharedExperts(absent=0),
        LastWindows(),
        FixedSettings(qk_layernorm=True),
        RequiredKeys({"norm_topk_prob": False}, norm_topk_prob=True),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on


FAMILIES = (GLM, GLM4, GLM4_MOE, GLM4_MOE_LITE, SOLAR_OPEN, DOTS1)
