"""Cohere 2 with experts (Command A+): experts in parallel with attention, with shared experts, and dense first layers.

Layers with a window have RoPE. Layers without one have none, except dense layers if
`prefix_dense_sliding_window_pattern` is 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.experts import EXPERTS, SHARED_EXPERTS
from megalith.bridge.families.llama import ATTENTION_BIAS, IGNORED, SIZES, TIED
from megalith.bridge.families.scaled import PARALLEL_TENSORS, LogitScale
from megalith.bridge.family import Family
from megalith.bridge.rope_settings import Rope
from megalith.bridge.settings import LAYER_KINDS, Field, FixedSettings, RequiredKeys, Tree, check_layer_types
from megalith.config import ModelConfig
from megalith.errors import ConfigError

MLP_KINDS = ("dense", "sparse")
WINDOW = 4096


class Layers:
    """Maps `layer_types` and `mlp_layer_types` to the layers with windows, with experts and with RoPE."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        count, dense = hf_config["num_hidden_layers"], hf_config.get("first_k_dense_replace") or 0
        prefix = self._count(hf_config, "prefix_dense_sliding_window_pattern", 1)
        kinds, mlps = hf_config.get("layer_types"), hf_config.get("mlp_layer_types")
        if kinds is None:
            every = self._count(hf_config, "sliding_window_pattern", 4)
            kinds = [LAYER_KINDS[(n + 1) % prefix > 0] for n in range(min(dense, count))]
            kinds += [LAYER_KINDS[(n + 1) % every > 0] for n in range(count - dense)]
        if mlps is None:
            mlps = [MLP_KINDS[n >= dense] for n in range(count)]
        check_layer_types(kinds, LAYER_KINDS)
        if unknown := [kind for kind in mlps if kind not in MLP_KINDS]:
            raise ConfigError(
                f"config.json has mlp_layer_types with {unknown[0]!r}, but layers must be dense or sparse; correct it"
            )
        if len(kinds) != count or len(mlps) != count:
            raise ConfigError(
                f"config.json has layer_types for {len(kinds)} and mlp_layer_types for {len(mlps)} layers, but "
                f"num_hidden_layers is {count}; correct them"
            )
        has_window = [kind == "sliding_attention" for kind in kinds]
        is_dense = [kind == "dense" for kind in mlps]
        fields: Tree = {
            "moe_layer_freq": [int(not dense) for dense in is_dense],
            "no_rope_freq": [
                int(not window and not (dense and prefix == 1)) for window, dense in zip(has_window, is_dense)
            ],
        }
        if any(has_window):
            window = hf_config.get("sliding_window", WINDOW)
            if window is None:
                raise ConfigError(
                    "config.json has sliding_window null and layers of type sliding_attention; set sliding_window"
                )
            fields |= {"window_size": [window - 1, 0], "window_attn_skip_freq": [int(w) for w in has_window]}
        return fields

    def write(self, model: ModelConfig) -> Tree:
        without_rope = model.layers_without_rope or [0] * model.num_layers
        in_prefix = [
            n for n in range(model.num_layers) if n not in model.expert_layers and not model.windows[n]
        ]
        return {
            "sliding_window": max(filter(None, model.windows), default=WINDOW),
            "layer_types": [LAYER_KINDS[window is not None] for window in model.windows],
            "mlp_layer_types": [MLP_KINDS[n in model.expert_layers] for n in range(model.num_layers)],
            "prefix_dense_sliding_window_pattern": 2 if any(without_rope[n] for n in in_prefix) else 1,
        }

    def _count(self, hf_config: Mapping[str, Any], key: str, default: int) -> int:
        value = hf_config.get(key, default)
        if type(value) is not int or value < 1:
            raise ConfigError(f"config.json has {key} {value!r}; it must be a whole number from 1")
        return value


class Widths:
    """Maps `prefix_dense_intermediate_size`, the shared experts' width and `shared_expert_combination_strategy`."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        width, shared = hf_config["intermediate_size"], hf_config.get("num_shared_experts") or 0
        dense = hf_config.get("prefix_dense_intermediate_size")
        fields: Tree = {"ffn_hidden_size": width if dense is None else dense}
        how = hf_config.get("shared_expert_combination_strategy", "average")
        if how not in ("average", "sum"):
            raise ConfigError(
                f"config.json has shared_expert_combination_strategy {how!r}, which is not supported; supported: "
                "average, sum"
            )
        if shared:
            fields["moe_shared_expert_intermediate_size"] = shared * width
            fields["moe_average_shared_expert"] = how == "average"
        return fields

    def write(self, model: ModelConfig) -> Tree:
        shared, width = model.moe_shared_expert_intermediate_size or 0, model.expert_size
        if shared % width:
            raise ConfigError(
                f"model.moe_shared_expert_intermediate_size {shared} is not a multiple of model.moe_ffn_hidden_size "
                f"{width}, but Cohere2MoeForCausalLM counts whole shared experts (num_shared_experts)"
            )
        return {
            "prefix_dense_intermediate_size": None if model.ffn_size == width else model.ffn_size,
            "num_shared_experts": shared // width,
            "shared_expert_combination_strategy": "average" if model.moe_average_shared_expert else "sum",
        }


class Scores:
    """Maps `expert_selection_fn` and, for sigmoid scores, `norm_topk_prob`."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        function, divides = (
            hf_config.get("expert_selection_fn", "softmax"),
            hf_config.get("norm_topk_prob", True),
        )
        if function == "softmax":
            return {}
        if function != "sigmoid":
            raise ConfigError(
                f"config.json has expert_selection_fn {function!r}, which is not supported; supported: softmax, sigmoid"
            )
        if divides and hf_config.get("num_experts_per_tok") == 1:
            raise ConfigError(
                "config.json has num_experts_per_tok 1 and norm_topk_prob: transformers gives a single expert the "
                "weight 1, but Megalith gives it its sigmoid score; only 2 or more are supported"
            )
        return {"moe_router_score_function": "sigmoid", "moe_router_norm_topk_prob": bool(divides)}

    def write(self, model: ModelConfig) -> Tree:
        is_sigmoid = model.moe_router_score_function == "sigmoid"
        divides = model.moe_router_norm_topk_prob and (model.moe_router_topk > 1 or not is_sigmoid)
        return {"expert_selection_fn": model.moe_router_score_function, "norm_topk_prob": divides}


class Norms:
    """Maps `rms_norm_eps` to RMSNorm. If it is null, maps `layer_norm_eps` to LayerNorm without biases."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        if (epsilon := hf_config.get("rms_norm_eps")) is not None:
            return {"normalization": "RMSNorm", "layernorm_epsilon": epsilon}
        epsilon = hf_config.get("layer_norm_eps", 1e-5)
        return {"normalization": "LayerNorm", "add_norm_bias": False, "layernorm_epsilon": epsilon}

    def write(self, model: ModelConfig) -> Tree:
        if model.normalization == "RMSNorm":
            return {"rms_norm_eps": model.layernorm_epsilon}
        return {"rms_norm_eps": None, "layer_norm_eps": model.layernorm_epsilon}


# fmt: off
COHERE2_MOE = Family(
    architecture="Cohere2MoeForCausalLM",
    model_type="cohere2_moe",
    defaults={"head_dim": 128},
    tensors={**PARALLEL_TENSORS, **EXPERTS, **SHARED_EXPERTS},
    settings=(
        *[size for size in SIZES if size.setting not in ("layernorm_epsilon", "ffn_hidden_size")],
        Norms(),
        Field("moe_ffn_hidden_size", "intermediate_size"),
        Widths(),
        TIED,
        Rope(),
        *ATTENTION_BIAS,
        LogitScale(),
        Layers(),
        Scores(),
        Field("num_experts", "num_experts", default=8),
        Field("moe_router_topk", "num_experts_per_tok", default=2),
        FixedSettings(swiglu=True, add_bias_linear=False, hidden_dropout=0.0, parallel_attn_mlp=True,
                      shared_layernorm=True, rotary_interleaved=True),
        RequiredKeys(hidden_act="silu"),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on

FAMILIES = (COHERE2_MOE,)
