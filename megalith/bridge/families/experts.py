"""Llama with experts: Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE, DeepSeek-MoE, V2 and V3.

OLMoE normalizes all query heads together, and all key heads together. Attention in the Qwen families is the same as in
the dense models; Qwen2-MoE also has a shared expert with a sigmoid gate. The DeepSeek families have dense first layers
and shared experts; V2 and V3 also have latent attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.llama import IGNORED, QK_NORMS, SETTINGS, SIZES, TENSORS, UNTIED
from megalith.bridge.family import Family
from megalith.bridge.mtp_rows import MTP, MTP_COPIES, MTPLayers
from megalith.bridge.rope_settings import MSCALES, Rope, rope_settings
from megalith.bridge.rows import gate_up, interleaved_heads, same
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, SameInAllLayers, Tree, Window
from megalith.config import ModelConfig
from megalith.errors import ConfigError

# fmt: off
EXPERTS = {
    "layers.{layer}.mlp.router.weight":
        same("model.layers.{layer}.mlp.gate.weight"),
    "layers.{layer}.mlp.experts.linear_fc1.weight":
        gate_up("model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
                "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"),
    "layers.{layer}.mlp.experts.linear_fc2.weight":
        same("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"),
}
NORMALIZED = Field("moe_router_pre_softmax", "norm_topk_prob", default=False, values={True: False, False: True})

MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    aliases={"num_experts": "num_local_experts"},
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    tensors={
        **TENSORS,
        "layers.{layer}.mlp.router.weight":
            same("model.layers.{layer}.block_sparse_moe.gate.weight"),
        "layers.{layer}.mlp.experts.linear_fc1.weight":
            gate_up("model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
                    "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight"),
        "layers.{layer}.mlp.experts.linear_fc2.weight":
            same("model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight"),
    },
    settings=(
        *SETTINGS,
        Field("num_experts", "num_local_experts", default=8),
        Field("moe_router_topk", "num_experts_per_tok", default=2),
        Window(default=None),
        RequiredKeys(router_jitter_noise=0.0),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

OLMOE = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    aliases={"num_local_experts": "num_experts"},
    defaults={"rms_norm_eps": 1e-5},
    tensors={**TENSORS, **EXPERTS, **QK_NORMS},
    settings=(
        *SETTINGS,
        Field("num_experts", "num_experts", default=64),
        Field("moe_router_topk", "num_experts_per_tok", default=8),
        NORMALIZED,
        FixedSettings(qk_layernorm=True, qk_layernorm_full_width=True),
        Field("clip_qkv", "clip_qkv", default=None),
        RequiredKeys(attention_bias=False),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on


class SparseLayers:
    """Maps `decoder_sparse_step` and `mlp_only_layers` to the layers with experts."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        step, dense = hf_config.get("decoder_sparse_step") or 1, hf_config.get("mlp_only_layers") or ()
        layers = range(hf_config["num_hidden_layers"])
        return {"moe_layer_freq": [int(n not in dense and (n + 1) % step == 0) for n in layers]}

    def write(self, model: ModelConfig) -> Tree:
        dense = sorted(set(range(model.num_layers)) - set(model.expert_layers))
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    defaults={"num_key_value_heads": 4},
    tensors={**TENSORS, **EXPERTS, **QK_NORMS},
    settings=(
        *SETTINGS,
        Field(
            "num_experts", "num_experts", default=128, alias="num_local_experts"
        ),  # transformers 5 writes the other
        Field("moe_router_topk", "num_experts_per_tok", default=8),
        Field("moe_ffn_hidden_size", "moe_intermediate_size", default=768),
        NORMALIZED,
        SparseLayers(),
        FixedSettings(qk_layernorm=True),
        RequiredKeys(attention_bias=False, use_sliding_window=False),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)


# fmt: off
QWEN2_MOE = Family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    defaults={"num_key_value_heads": 16},
    tensors={
        **TENSORS,
        **EXPERTS,
        "layers.{layer}.mlp.shared_experts.linear_fc1.weight":
            gate_up("model.layers.{layer}.mlp.shared_expert.gate_proj.weight",
                    "model.layers.{layer}.mlp.shared_expert.up_proj.weight"),
        "layers.{layer}.mlp.shared_experts.linear_fc2.weight":
            same("model.layers.{layer}.mlp.shared_expert.down_proj.weight"),
        "layers.{layer}.mlp.shared_expert_gate.weight":
            same("model.layers.{layer}.mlp.shared_expert_gate.weight"),
    },
    settings=(
        *SETTINGS,
        Field("num_experts", "num_experts", default=60),
        Field("moe_router_topk", "num_experts_per_tok", default=4),
        Field("moe_ffn_hidden_size", "moe_intermediate_size", default=1408),
        Field("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", default=5632),
        NORMALIZED,
        SparseLayers(),
        Field("add_qkv_bias", "qkv_bias", default=True),
        FixedSettings(moe_shared_expert_gate=True),
        RequiredKeys(use_sliding_window=False),
        SameInAllLayers("layer_types", "full_attention"),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on


class DenseFirst:
    """Maps `first_k_dense_replace`, the number of dense layers at the start, to the layers with experts."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        dense = hf_config.get("first_k_dense_replace") or 0
        return {"moe_layer_freq": [0] * dense + [1] * (hf_config["num_hidden_layers"] - dense)}

    def write(self, model: ModelConfig) -> Tree:
        return {"first_k_dense_replace": model.expert_layers[0] if model.expert_layers else model.num_layers}


class MlpLayerTypes:
    """Maps `mlp_layer_types`, a list of `dense` and `sparse`, to the layers with experts (`sparse`).

    If config.json omits the list, the key `count`, or else `dense`, is the number of first layers without experts.
    """

    def __init__(self, dense: int, count: str | None = None):
        self._dense, self._count = dense, count

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        kinds, layers = hf_config.get("mlp_layer_types"), hf_config["num_hidden_layers"]
        if kinds is None:
            dense = hf_config.get(self._count)
            dense = min(self._dense if dense is None else dense, layers)
            return {"moe_layer_freq": [0] * dense + [1] * (layers - dense)}
        if others := [kind for kind in kinds if kind not in ("dense", "sparse")]:
            raise ConfigError(
                f"config.json has mlp_layer_types with {others[0]!r}, but layers must be dense or sparse; correct "
                "mlp_layer_types"
            )
        return {"moe_layer_freq": [int(kind == "sparse") for kind in kinds]}

    def write(self, model: ModelConfig) -> Tree:
        sparse = model.expert_layers
        return {"mlp_layer_types": [("dense", "sparse")[n in sparse] for n in range(model.num_layers)]}


class SharedExperts:
    """Maps the number of shared experts to the width of one MLP, into which Megalith joins them.

    Args:
        key: key of the number.
        absent: value to write if there are none.
        default: the number if config.json omits the key.
    """

    def __init__(self, key: str = "n_shared_experts", absent: int | None = None, default: int | None = None):
        self._key, self._absent, self._default = key, absent, default

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        count, width = hf_config.get(self._key, self._default), hf_config.get("moe_intermediate_size")
        if not count:
            return {}
        if width is None:
            raise ConfigError(
                f"config.json has {self._key} {count} and no moe_intermediate_size, the width of an expert; add "
                "moe_intermediate_size"
            )
        return {"moe_shared_expert_intermediate_size": count * width}

    def write(self, model: ModelConfig) -> Tree:
        width = model.moe_shared_expert_intermediate_size or 0
        if width % model.expert_size:
            raise ConfigError(
                f"the shared expert's width {width} is not a multiple of an expert's width {model.expert_size}"
            )
        return {self._key: width // model.expert_size or self._absent}


class RouterGroups:
    """Maps `n_group` and `topk_group`, for group-limited routing. A value of 1 means no limit.

    method: True if config.json has `topk_method`, as in DeepSeek-V2. DeepSeek-V3 lacks this key and scores a group by
    the sum of its two best experts.
    """

    def __init__(self, method: bool):
        self._method = method

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        for key in ("n_group", "topk_group"):
            if hf_config.get(key) == 0:
                raise ConfigError(f"config.json has {key} 0; use 1 to choose among all experts")
        groups, best = hf_config.get("n_group") or 1, hf_config.get("topk_group") or 1
        if groups == 1 or (self._method and hf_config.get("topk_method", "greedy") == "greedy"):
            return {}
        if not self._method and hf_config["num_experts_per_tok"] != 2 * best:
            raise ConfigError(
                f"config.json has num_experts_per_tok {hf_config['num_experts_per_tok']} and topk_group "
                f"{best}, but in this family a group's score is the sum of 2 experts' scores, so "
                "num_experts_per_tok must be 2 × topk_group"
            )
        return {"moe_router_num_groups": groups, "moe_router_group_topk": best}

    def write(self, model: ModelConfig) -> Tree:
        groups, best = model.moe_router_num_groups, model.moe_router_group_topk
        if not self._method:
            return {"n_group": groups or 1, "topk_group": best or 1}
        return {
            "n_group": groups,
            "topk_group": best,
            "topk_method": "group_limited_greedy" if groups else "greedy",
        }


class SigmoidScores:
    """Sets sigmoid router scores, divided by their sum over a token's experts.

    A single expert per token is rejected: transformers gives it the weight 1, Megalith its score.
    """

    def __init__(self, bias: bool = True):
        self._bias = bias  # added to the scores for choosing

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        if hf_config.get("num_experts_per_tok") == 1:
            raise ConfigError(
                "config.json has num_experts_per_tok 1: transformers gives a single expert the weight 1, but "
                "Megalith gives it its sigmoid score; only 2 or more are supported"
            )
        return {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": self._bias}

    def write(self, model: ModelConfig) -> Tree:
        if model.moe_router_topk == 1:
            raise ConfigError(
                "with moe_router_topk 1, transformers gives the expert the weight 1, but this model "
                "weights it by its sigmoid score"
            )
        return {}


class LatentHeads:
    """Checks that `num_key_value_heads` equals the number of attention heads."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        heads = hf_config["num_attention_heads"]
        if hf_config.get("num_key_value_heads") not in (None, heads):
            raise ConfigError(
                f"config.json has num_key_value_heads {hf_config['num_key_value_heads']} and num_attention_heads "
                f"{heads}; latent attention has keys and values for every head, so set num_key_value_heads to {heads}"
            )
        return {}

    def write(self, model: ModelConfig) -> Tree:
        return {"num_key_value_heads": model.num_attention_heads}


class RotaryHeads:
    """Checks `head_dim`, which transformers uses as the number of rotary dimensions per head.

    `default` is that number if config.json omits qk_rope_head_dim.
    """

    def __init__(self, default: int = 64):
        self._default = default

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        size = hf_config.get("qk_rope_head_dim", self._default)
        if hf_config.get("head_dim") not in (None, size):
            raise ConfigError(
                f"config.json has head_dim {hf_config['head_dim']} and qk_rope_head_dim {size}, which mean the same in "
                "this family; remove head_dim"
            )
        return {}

    def write(self, model: ModelConfig) -> Tree:
        return {}


class MscaleRope(Rope):
    """Maps RoPE scaling, including YaRN's mscale and mscale_all_dim."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        rope = rope_settings(hf_config)
        scales = {name: value for name in MSCALES if (value := rope.pop(name, None))}
        fields = super().read({**hf_config, "rope_parameters": rope, "rope_scaling": None})
        if "rope_scaling" in fields:
            fields["rope_scaling"] |= scales
        return fields

    def write(self, model: ModelConfig) -> Tree:
        tree = super().write(model)
        if model.rope_scaling is not None:
            scales = {name: getattr(model.rope_scaling, name) for name in MSCALES}
            tree["rope_scaling"] |= {name: value for name, value in scales.items() if value is not None}
        return tree


# fmt: off
SHARED_EXPERTS = {
    "layers.{layer}.mlp.shared_experts.linear_fc1.weight":
        gate_up("model.layers.{layer}.mlp.shared_experts.gate_proj.weight",
                "model.layers.{layer}.mlp.shared_experts.up_proj.weight"),
    "layers.{layer}.mlp.shared_experts.linear_fc2.weight":
        same("model.layers.{layer}.mlp.shared_experts.down_proj.weight"),
}
DEEPSEEK_MOE = Family(  # its class is in the model's own folder, not in transformers
    architecture="DeepseekForCausalLM",
    model_type="deepseek",
    tensors={**TENSORS, **EXPERTS, **SHARED_EXPERTS},
    settings=(
        *SETTINGS,
        Field("num_experts", "n_routed_experts"),
        Field("moe_router_topk", "num_experts_per_tok"),
        Field("moe_ffn_hidden_size", "moe_intermediate_size", default=1407),
        NORMALIZED,
        DenseFirst(),
        SharedExperts(),
        RequiredKeys(attention_bias=False, moe_layer_freq=1, scoring_func="softmax"),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

LATENT = {
    "layers.{layer}.self_attention.linear_q_proj.weight":
        interleaved_heads("model.layers.{layer}.self_attn.q_proj.weight", "qk_head_dim"),
    "layers.{layer}.self_attention.linear_q_down_proj.weight":
        same("model.layers.{layer}.self_attn.q_a_proj.weight"),
    "layers.{layer}.self_attention.q_down_layernorm.weight":
        same("model.layers.{layer}.self_attn.q_a_layernorm.weight"),
    "layers.{layer}.self_attention.linear_q_up_proj.weight":
        interleaved_heads("model.layers.{layer}.self_attn.q_b_proj.weight", "qk_head_dim"),
    "layers.{layer}.self_attention.linear_kv_down_proj.weight":
        interleaved_heads("model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight", "kv_lora_rank"),
    "layers.{layer}.self_attention.kv_down_layernorm.weight":
        same("model.layers.{layer}.self_attn.kv_a_layernorm.weight"),
    "layers.{layer}.self_attention.linear_kv_up_proj.weight":
        same("model.layers.{layer}.self_attn.kv_b_proj.weight"),
}
LATENT_SIZES = (
    Field("kv_lora_rank", "kv_lora_rank", default=512),
    Field("qk_head_dim", "qk_nope_head_dim", default=128),
    Field("qk_pos_emb_head_dim", "qk_rope_head_dim", default=64),
    Field("v_head_dim", "v_head_dim", default=128),
)
ROUTED_EXPERTS = (
    Field("num_experts", "n_routed_experts"),
    Field("moe_router_topk", "num_experts_per_tok"),
    Field("moe_ffn_hidden_size", "moe_intermediate_size"),
    Field("moe_router_topk_scaling_factor", "routed_scaling_factor", default=1.0),
)
SHARED = {
    "layers.{layer}.mlp.router.expert_bias":
        same("model.layers.{layer}.mlp.gate.e_score_correction_bias"),
    **SHARED_EXPERTS,
}
ROWS = {**TENSORS, **LATENT, **EXPERTS, **SHARED}

SETTINGS = (
    *[size for size in SIZES if size.setting not in ("num_query_groups", "kv_channels")],
    LatentHeads(),
    UNTIED,
    MscaleRope(),
    Field("q_lora_rank", "q_lora_rank", default=1536),
    *LATENT_SIZES,
    *ROUTED_EXPERTS,
    DenseFirst(),
    SharedExperts(),
    FixedSettings(normalization="RMSNorm", swiglu=True, add_bias_linear=False, hidden_dropout=0.0,
                  multi_latent_attention=True),
    RequiredKeys(hidden_act="silu", attention_bias=False, moe_layer_freq=1),
)

DEEPSEEK_V2 = Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    aliases={"num_experts": "n_routed_experts"},
    defaults={"n_shared_experts": 2},
    tensors=ROWS,
    settings=(
        *SETTINGS,
        RouterGroups(method=True),
        FixedSettings(moe_router_pre_softmax=True),
        RequiredKeys(norm_topk_prob=False, mlp_bias=False),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    defaults={"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "n_shared_experts": 1,
            "routed_scaling_factor": 2.5},
    tensors=ROWS | MTP,
    mtp_copies=MTP_COPIES,
    settings=(
        *SETTINGS,
        RouterGroups(method=False),
        RotaryHeads(),
        SigmoidScores(),
        RequiredKeys(norm_topk_prob=True, rope_interleave=True),
        MTPLayers(default=1),
    ),
    tied="lm_head.weight",
    ignored=(*IGNORED, r"layers\.61\."),  # of the published model's MTP layer, if config.json says it has none
)
# fmt: on


FAMILIES = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, DEEPSEEK_MOE, DEEPSEEK_V2, DEEPSEEK_V3)
