"""Llama 4's text model: Llama with experts, and attention within chunks in the layers with RoPE.

Each expert's input is multiplied by its weight. Layers without RoPE scale queries by their position; in the others,
queries and keys have a norm without a weight. RoPE pairs adjacent dimensions. The files have one tensor for the
matrices of all experts, [experts, in, out].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.llama import ATTENTION_BIAS, IGNORED, SIZES, TENSORS, UNTIED, LayersWithoutRope
from megalith.bridge.family import Family
from megalith.bridge.rope_settings import Rope
from megalith.bridge.rows import gate_up, same, stacked
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Tree
from megalith.config import ModelConfig
from megalith.errors import ConfigError

CHUNK = 8192


class ExpertLayers:
    """Maps `moe_layers`, or else `interleave_moe_layer_step`, to the layers with experts."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        layers, step = hf_config.get("moe_layers"), hf_config.get("interleave_moe_layer_step", 1)
        count = hf_config["num_hidden_layers"]
        if layers is None:
            if not step:
                raise ConfigError(
                    f"config.json has interleave_moe_layer_step {step}, but it is the distance between layers "
                    "with experts and must be a whole number of at least 1"
                )
            layers = range(step - 1, count, step)
        return {"moe_layer_freq": [int(layer in layers) for layer in range(count)]}

    def write(self, model: ModelConfig) -> Tree:
        return {"moe_layers": model.expert_layers}


class ChunkedLayers:
    """Maps `attention_chunk_size` to the layers that `layer_types` calls chunked_attention, which are the layers with
    RoPE.
    """

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        size, kinds = hf_config.get("attention_chunk_size", CHUNK), hf_config.get("layer_types")
        count = hf_config["num_hidden_layers"]
        frequency = LayersWithoutRope().read(hf_config).get("no_rope_freq", [0] * count)
        if isinstance(frequency, int):
            frequency = [int((n + 1) % frequency == 0) for n in range(count)] if frequency else [0] * count
        chunked = [("chunked_attention", "full_attention")[without] for without in frequency]
        if kinds is None or (size is not None and kinds[:count] == chunked):
            return {"attention_chunk_size": size}
        if "chunked_attention" not in kinds:
            return {}
        raise ConfigError(
            f"config.json has layer_types {kinds}; in this family, layers with RoPE must have chunked_attention and "
            "the others full_attention (see no_rope_layers), or all full_attention"
        )

    def write(self, model: ModelConfig) -> Tree:
        chunked = [model.attention_chunk(layer) is not None for layer in range(model.num_layers)]
        return {
            "attention_chunk_size": model.attention_chunk_size,
            "layer_types": [("full_attention", "chunked_attention")[one] for one in chunked],
        }


class QueryScalingKeys:
    """Maps `attn_temperature_tuning`, `floor_scale` and `attn_scale`, the query scaling of layers without RoPE."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        beta, length = hf_config.get("attn_scale", 0.1), hf_config.get("floor_scale", CHUNK)
        if not hf_config.get("attn_temperature_tuning", True) or beta == 0:
            return {}
        return {
            "query_scaling_beta": beta,
            "query_scaling_length": length,
            "query_scaling_layers": "no_rope",
        }

    def write(self, model: ModelConfig) -> Tree:
        scales = model.query_scaling_beta is not None
        tree = {"attn_temperature_tuning": scales, "floor_scale": model.query_scaling_length}
        return {**tree, "attn_scale": model.query_scaling_beta} if scales else tree


class RopeBeforeNorm(Rope):
    """Maps the RoPE settings. With QK norms, which cancel it, the attention factor is set to 1."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        fields = super().read(hf_config)
        scaling = fields.get("rope_scaling")
        if (
            scaling is not None
            and scaling["type"] in ("yarn", "longrope")
            and hf_config.get("use_qk_norm", True)
        ):
            scaling["attention_factor"] = 1.0
        return fields


class QKNorm:
    """Maps `use_qk_norm`: QK norms without weights, in layers with RoPE."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        uses_norm = bool(hf_config.get("use_qk_norm", True))
        return {"qk_l2_norm": uses_norm, "qk_l2_norm_rope_only": uses_norm}

    def write(self, model: ModelConfig) -> Tree:
        return {"use_qk_norm": model.qk_l2_norm}


class ExpertsPerToken:
    """Maps `num_experts_per_tok`. Expert weights are not divided by their sum."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        topk = hf_config.get("num_experts_per_tok", 1)
        return {"moe_router_topk": topk, "moe_router_norm_topk_prob": topk == 1}

    def write(self, model: ModelConfig) -> Tree:
        return {"num_experts_per_tok": model.moe_router_topk}


class SharedExpert:
    """Maps `intermediate_size`, the width of each expert and of the shared expert."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        size = hf_config.get("intermediate_size", 8192)
        return {"moe_ffn_hidden_size": size, "moe_shared_expert_intermediate_size": size}

    def write(self, model: ModelConfig) -> Tree:
        return {"intermediate_size": model.expert_size}


# fmt: off
LAYER = "model.layers.{layer}."
LLAMA4 = Family(
    architecture="Llama4ForCausalLM",
    model_type="llama4_text",
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
    tensors={
        **{name: rule for name, rule in TENSORS.items() if ".mlp." not in name},
        "layers.{layer}.mlp.linear_fc1.weight":
            gate_up(LAYER + "feed_forward.gate_proj.weight", LAYER + "feed_forward.up_proj.weight"),
        "layers.{layer}.mlp.linear_fc2.weight":
            same(LAYER + "feed_forward.down_proj.weight"),
        "layers.{layer}.mlp.router.weight":
            same(LAYER + "feed_forward.router.weight"),
        "layers.{layer}.mlp.experts.linear_fc1.weight":
            stacked(gate_up(LAYER + "feed_forward.experts.gate_up_proj"), transposed=True),
        "layers.{layer}.mlp.experts.linear_fc2.weight":
            stacked(same(LAYER + "feed_forward.experts.down_proj"), transposed=True),
        "layers.{layer}.mlp.shared_experts.linear_fc1.weight":
            gate_up(LAYER + "feed_forward.shared_expert.gate_proj.weight",
                    LAYER + "feed_forward.shared_expert.up_proj.weight"),
        "layers.{layer}.mlp.shared_experts.linear_fc2.weight":
            same(LAYER + "feed_forward.shared_expert.down_proj.weight"),
    },
    settings=(
        *[size for size in SIZES if size.setting != "ffn_hidden_size"],
        Field("ffn_hidden_size", "intermediate_size_mlp", default=16384),
        UNTIED,
        *ATTENTION_BIAS,
        RopeBeforeNorm(),
        LayersWithoutRope(),
        ChunkedLayers(),
        QueryScalingKeys(),
        QKNorm(),
        Field("num_experts", "num_local_experts", default=16),
        ExpertLayers(),
        SharedExpert(),
        ExpertsPerToken(),
        FixedSettings(normalization="RMSNorm", swiglu=True, add_bias_linear=False, hidden_dropout=0.0,
                      rotary_interleaved=True, moe_router_score_function="sigmoid", moe_apply_probs_on_input=True),
        RequiredKeys(hidden_act="silu"),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on

FAMILIES = (LLAMA4,)
