"""Mixtures of experts with sigmoid scores: MiniMax-M2, Hunyuan 3 (hy_v3), AFMoE (Trinity) and Flint; and Mellum.

MiniMax-M2: partial RoPE, QK norms over all heads. AFMoE: an output gate in attention, norms before and after, RoPE only
in layers with a window. Flint: attention sinks, RoPE only in layers with a window. Mellum: Qwen3-MoE with windows that
have their own RoPE base.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.experts import (
    EXPERTS,
    MIXTRAL,
    NORMALIZED,
    QWEN2_MOE,
    SHARED_EXPERTS,
    MlpLayerTypes,
    SharedExperts,
    SigmoidScores,
    SparseLayers,
)
from megalith.bridge.families.hunyuan import SHARED_MLP
from megalith.bridge.families.llama import IGNORED, QK_NORMS, SETTINGS, TENSORS
from megalith.bridge.families.scaled import RopeInWindows
from megalith.bridge.family import Family
from megalith.bridge.rope_settings import PartialRope, Rope, RopeByLayer
from megalith.bridge.rows import RowRun, Rule, same
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Tree, WindowsByLayer, WrittenKeys
from megalith.config import ModelConfig

WITHOUT_ROPE = tuple(row for row in SETTINGS if not isinstance(row, Rope))


class RotaryDim(PartialRope):
    """Maps `rotary_dim`, or else a fraction in rope_parameters, to the rotary fraction of each head."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        size, rotary = hf_config.get("head_dim") or 128, hf_config.get("rotary_dim")
        if rotary and hf_config.get(self.share) is None:
            hf_config = {**hf_config, self.share: rotary / size}
        return super().read(hf_config)

    def write(self, model: ModelConfig) -> Tree:
        return super().write(model) | {"rotary_dim": model.rotary_size}


# fmt: off
MINIMAX_M2 = Family(
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    aliases={"num_experts": "num_local_experts"},
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5e6},
    tensors={
        **MIXTRAL.tensors,
        **QK_NORMS,
        "layers.{layer}.mlp.router.expert_bias":
            same("model.layers.{layer}.block_sparse_moe.e_score_correction_bias"),
    },
    settings=(
        *WITHOUT_ROPE,
        RotaryDim(1.0),
        Field("num_experts", "num_local_experts", default=256),
        Field("moe_router_topk", "num_experts_per_tok", default=8),
        FixedSettings(qk_layernorm=True, qk_layernorm_full_width=True),
        SigmoidScores(),
        RequiredKeys(router_jitter_noise=0.0),
    ),
    tied="lm_head.weight",
    ignored=(*IGNORED, r"\.mtp_modules\."),
)

ROUTER = {
    "layers.{layer}.mlp.router.weight":
        same("model.layers.{layer}.mlp.router.gate.weight"),
    "layers.{layer}.mlp.router.expert_bias":
        same("model.layers.{layer}.mlp.expert_bias"),
}
HY_V3 = Family(
    architecture="HYV3ForCausalLM",
    model_type="hy_v3",
    aliases={"num_local_experts": "num_experts"},
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 11158840.0,
              "initializer_range": 0.006, "moe_intermediate_size": 1536},
    tensors={
        **TENSORS,
        **EXPERTS,
        **QK_NORMS,
        **ROUTER,
        **SHARED_MLP,
    },
    settings=(
        *SETTINGS,
        Field("num_experts", "num_experts", default=192),
        Field("moe_router_topk", "num_experts_per_tok", default=8),
        Field("moe_ffn_hidden_size", "moe_intermediate_size"),
        Field("moe_router_topk_scaling_factor", "router_scaling_factor", default=2.826),
        MlpLayerTypes(dense=1),
        SharedExperts("num_shared_experts", absent=0, default=1),
        SigmoidScores(),
        FixedSettings(qk_layernorm=True),
        RequiredKeys(attention_bias=False, mlp_bias=False),
    ),
    tied="lm_head.weight",
    ignored=(*IGNORED, r"layers\.80\."),
)


def _queries_and_gates(model: ModelConfig, rows: int) -> list[RowRun]:
    """Order rows by KV group: queries, gates, key, value, from four tensors."""
    size, in_group = model.head_dim, model.num_attention_heads // model.query_groups
    runs, ours = [], 0
    for group in range(model.query_groups):
        for source, heads in enumerate((in_group, in_group, 1, 1)):
            runs.append(RowRun(source, group * heads * size, ours, heads * size))
            ours += heads * size
    return runs


class DenseLayers:
    """Maps `num_dense_layers`, the number of dense layers at the start. `default` applies if config.json omits it."""

    def __init__(self, default: int = 1):
        self._default = default

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        count, layers = hf_config.get("num_dense_layers", self._default), hf_config["num_hidden_layers"]
        return {"moe_layer_freq": [int(number >= (count or 0)) for number in range(layers)]}

    def write(self, model: ModelConfig) -> Tree:
        return {"num_dense_layers": next(iter(model.expert_layers), model.num_layers)}


AFMOE_WINDOWS = WindowsByLayer(every=4, default=1024, pattern="global_attn_every_n_layers", unused=1024)
AFMOE = Family(
    architecture="AfmoeForCausalLM",
    model_type="afmoe",
    defaults={"head_dim": 128, "rms_norm_eps": 1e-5, "moe_intermediate_size": 1408},
    tensors={
        **TENSORS,
        **EXPERTS,
        **SHARED_EXPERTS,
        **QK_NORMS,
        **ROUTER,
        "layers.{layer}.self_attention.linear_qkv.weight":
            Rule(tuple(f"model.layers.{{layer}}.self_attn.{part}_proj.weight" for part in ("q", "gate", "k", "v")),
                 _queries_and_gates),
        "layers.{layer}.post_attention_layernorm.weight":
            same("model.layers.{layer}.post_attention_layernorm.weight"),
        "layers.{layer}.pre_mlp_layernorm.weight":
            same("model.layers.{layer}.pre_mlp_layernorm.weight"),
        "layers.{layer}.post_mlp_layernorm.weight":
            same("model.layers.{layer}.post_mlp_layernorm.weight"),
    },
    settings=(
        *SETTINGS,
        AFMOE_WINDOWS,
        RopeInWindows(AFMOE_WINDOWS),
        Field("num_experts", "num_experts", default=64),
        Field("moe_router_topk", "num_experts_per_tok", default=6),
        Field("moe_ffn_hidden_size", "moe_intermediate_size"),
        Field("moe_router_topk_scaling_factor", "route_scale", default=1.0),
        Field("scale_embeddings", "mup_enabled", default=False),
        DenseLayers(),
        SharedExperts("num_shared_experts", absent=0, default=2),
        SigmoidScores(),
        FixedSettings(qk_layernorm=True, attention_output_gate=True, norm_placement="sandwich"),
        RequiredKeys(attention_bias=False),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on


class FlintWindows(WindowsByLayer):
    """Maps `layer_types` to windows. By default, the first two layers, every fourth and the last have none."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        if hf_config.get("layer_types") is None:
            count = hf_config["num_hidden_layers"]
            full = [number < 2 or number % 4 == 1 or number == count - 1 for number in range(count)]
            hf_config = {
                **hf_config,
                "layer_types": [("sliding_attention", "full_attention")[one] for one in full],
            }
        return super().read(hf_config)


class FlintLayers(SparseLayers):
    """Maps `mlp_only_layers` to the layers with experts. By default, only the first two layers have none."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        if hf_config.get("mlp_only_layers") is None:
            hf_config = {**hf_config, "mlp_only_layers": [0, 1]}
        return super().read(hf_config)


FLINT_WINDOWS = FlintWindows(default=513, pattern=None, unused=513)

# fmt: off
FLINT = Family(
    architecture="FlintForCausalLM",
    model_type="flint",
    defaults={"num_key_value_heads": 4, "head_dim": 128},
    tensors={
        **QWEN2_MOE.tensors,
        **QK_NORMS,
        "layers.{layer}.self_attention.softmax_offset.weight":
            same("model.layers.{layer}.self_attn.softmax_offset"),
    },
    settings=(
        *SETTINGS,
        FLINT_WINDOWS,
        RopeInWindows(FLINT_WINDOWS),
        Field("num_experts", "num_experts", default=256),
        Field("moe_router_topk", "num_experts_per_tok", default=6),
        Field("moe_ffn_hidden_size", "moe_intermediate_size", default=512),
        Field("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", default=1024),
        FlintLayers(),
        SigmoidScores(bias=False),
        FixedSettings(qk_layernorm=True, softmax_type="learnable"),
        RequiredKeys(attention_bias=False, norm_topk_prob=True),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

MELLUM = Family(
    architecture="MellumForCausalLM",
    model_type="mellum",
    aliases={"num_experts": "num_local_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    defaults={"num_key_value_heads": 4, "head_dim": 128, "norm_topk_prob": True},
    tensors={**TENSORS, **EXPERTS, **QK_NORMS},
    settings=(
        *WITHOUT_ROPE,
        RopeByLayer(base=500_000.0, local_base=10_000.0, nested=True),
        WindowsByLayer(every=1, default=1024, pattern=None, unused=1024),
        Field("num_experts", "num_local_experts", default=64),
        Field("moe_router_topk", "num_experts_per_tok", default=8),
        Field("moe_ffn_hidden_size", "moe_intermediate_size", default=896),
        NORMALIZED,
        MlpLayerTypes(dense=0),
        FixedSettings(qk_layernorm=True),
        RequiredKeys(attention_bias=False),
        WrittenKeys(num_nextn_predict_layers=None),
    ),
    tied="lm_head.weight",
    ignored=(*IGNORED, r"^mtp\."),
)
# fmt: on


FAMILIES = (MINIMAX_M2, HY_V3, AFMOE, FLINT, MELLUM)
