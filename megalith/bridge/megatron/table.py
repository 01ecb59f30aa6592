"""Megatron core's GPT and BERT as families: their tensors and their arguments, whose names are mostly ours.

Fused SwiGLU matrices hold the gate before the up, there; ours alternate. Queries, keys and values stand by group in
both. The names here are those of the layers without Transformer Engine, experts one by one: readers and writers
rename from and to the others (`megatron_names.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.family import Family
from megalith.bridge.rows import RowRun, Rule, gate_up, same
from megalith.bridge.settings import Field, Ours, Theirs, Tree
from megalith.config import ModelConfig
from megalith.errors import ConfigError


def fc1(name: str) -> Rule:
    """The first matrix of the MLP: gate and up where it is gated."""

    def order(model: ModelConfig, rows: int) -> list[RowRun]:
        return gate_up(name).order(model, rows) if model.gated else [RowRun(0, 0, 0, rows)]

    return Rule((name,), order)


# fmt: off
TENSORS = {
    "embedding.word_embeddings.weight":     same("embedding.word_embeddings.weight"),
    "embedding.position_embeddings.weight": same("embedding.position_embeddings.weight"),
    **{
        f"layers.{{layer}}.{part}": same(f"decoder.layers.{{layer}}.{part}")
        for part in (
            "input_layernorm.weight", "input_layernorm.bias",
            "self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias",
            "self_attention.linear_proj.weight", "self_attention.linear_proj.bias",
            "self_attention.q_layernorm.weight", "self_attention.q_layernorm.bias",
            "self_attention.k_layernorm.weight", "self_attention.k_layernorm.bias",
            "pre_mlp_layernorm.weight", "pre_mlp_layernorm.bias",
            "mlp.linear_fc2.weight", "mlp.linear_fc2.bias",
        )
    },
    **{
        f"layers.{{layer}}.mlp.{ours}.{kind}": rule(f"decoder.layers.{{layer}}.mlp.{theirs}.{kind}")
        for ours, theirs, rule in (
            ("linear_fc1", "linear_fc1", fc1),
            ("shared_experts.linear_fc1", "shared_experts.linear_fc1", fc1),
            ("shared_experts.linear_fc2", "shared_experts.linear_fc2", same),
            ("experts.linear_fc1", "experts.local_experts.{expert}.linear_fc1", fc1),
            ("experts.linear_fc2", "experts.local_experts.{expert}.linear_fc2", same),
        )
        for kind in ("weight", "bias")
    },
    "layers.{layer}.mlp.router.weight":      same("decoder.layers.{layer}.mlp.router.weight"),
    "layers.{layer}.mlp.router.bias":        same("decoder.layers.{layer}.mlp.router.bias"),
    "layers.{layer}.self_attention.softmax_offset.weight":
        same("decoder.layers.{layer}.self_attention.core_attention.softmax_offset"),
    "layers.{layer}.mlp.router.expert_bias": same("decoder.layers.{layer}.mlp.router.expert_bias"),
    "layers.{layer}.mlp.shared_expert_gate.weight":
        same("decoder.layers.{layer}.mlp.shared_experts.gate_weight"),
    "final_layernorm.weight":               same("decoder.final_layernorm.weight"),
    "final_layernorm.bias":                 same("decoder.final_layernorm.bias"),
    "output_layer.weight":                  same("output_layer.weight"),
}
# fmt: on


class _Groups:
    """num_query_groups counts only with group_query_attention."""

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        return {
            "num_query_groups": theirs.get("num_query_groups", 0)
            if theirs.get("group_query_attention")
            else 0
        }

    def write(self, model: ModelConfig) -> Tree:
        grouped = model.query_groups != model.num_attention_heads
        return {"group_query_attention": grouped, "num_query_groups": model.query_groups if grouped else 1}


class _Activation:
    """Without swiglu and the like GELU: exact, or by tanh in Megatron's fused kernel and with openai_gelu."""

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        if theirs.get("swiglu"):
            return {"swiglu": True}
        if theirs.get("quick_geglu"):
            return {"gated_linear_unit": True, "activation": "quick_gelu"}
        if theirs.get("squared_relu"):
            return {"activation": "squared_relu"}
        by_tanh = theirs.get("openai_gelu") or theirs.get("bias_gelu_fusion", True)
        return {"activation": "gelu_tanh" if by_tanh else "gelu"}

    def write(self, model: ModelConfig) -> Tree:
        by_tanh = not model.gated and model.mlp_activation == "gelu_tanh"
        return {
            "swiglu": model.gated and model.mlp_activation == "silu",
            "quick_geglu": model.gated and model.mlp_activation == "quick_gelu",
            "squared_relu": model.mlp_activation == "squared_relu",
            "bias_gelu_fusion": by_tanh and model.mlp_bias,
            "openai_gelu": by_tanh and not model.mlp_bias,
        }


class _Biases:
    """add_bias_linear, in every linear layer and the router, and add_qkv_bias."""

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        fields = {name: theirs[name] for name in ("add_bias_linear", "add_qkv_bias") if name in theirs}
        return fields | {
            "add_router_bias": bool(theirs.get("num_experts")) and fields.get("add_bias_linear", True)
        }

    def write(self, model: ModelConfig) -> Tree:
        return {"add_bias_linear": model.proj_bias and model.mlp_bias, "add_qkv_bias": model.qkv_bias}


class _Experts:
    """num_experts and what is said of them, under our names; without it, as Megatron's arguments have defaults too."""

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        if not theirs.get("num_experts"):
            return {}
        return {name: theirs[name] for name in EXPERTS if theirs.get(name) is not None}

    def write(self, model: ModelConfig) -> Tree:
        if model.num_experts is None:
            return {"num_experts": None}
        layers = [int(layer in model.expert_layers) for layer in range(model.num_layers)]
        return {
            **{name: getattr(model, name) for name in EXPERTS},
            "moe_ffn_hidden_size": model.expert_size,
            "moe_layer_freq": 1 if all(layers) else layers,
        }


class _Positions:
    """position_embedding_type with what rotary positions are stretched by."""

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        kind = theirs.get("position_embedding_type", "learned_absolute")
        if theirs.get("use_rotary_position_embeddings"):
            kind = "rope"
        if kind not in ("learned_absolute", "rope"):
            raise ConfigError(
                f"its args have position_embedding_type {kind!r}; known: 'learned_absolute', 'rope'"
            )
        if kind != "rope":
            return {"position_embedding_type": kind}
        fields: Tree = {
            "position_embedding_type": kind,
            "rotary_base": theirs.get("rotary_base", 10000),
            "rotary_percent": theirs.get("rotary_percent", 1.0),
            "rotary_interleaved": theirs.get("rotary_interleaved", False),
            "no_rope_freq": theirs.get("no_rope_freq"),
        }
        if theirs.get("use_rope_scaling"):
            fields["rope_scaling"] = {"type": "llama3", "factor": theirs.get("rope_scaling_factor", 8.0)}
        elif theirs.get("rotary_seq_len_interpolation_factor"):
            fields["rope_scaling"] = {
                "type": "linear",
                "factor": theirs["rotary_seq_len_interpolation_factor"],
            }
        return fields

    def write(self, model: ModelConfig) -> Tree:
        scaling = model.rope_scaling
        stretched, linear = (scaling is not None and scaling.type == kind for kind in ("llama3", "linear"))
        return {
            "position_embedding_type": model.position_embedding_type,
            "rotary_base": int(base) if (base := model.rotary_base).is_integer() else base,
            "rotary_percent": model.rotary_percent,
            "rotary_interleaved": model.rotary_interleaved,
            "no_rope_freq": model.layers_without_rope,
            "use_rope_scaling": stretched,
            "rope_scaling_factor": scaling.factor if stretched else 8.0,
            "rotary_seq_len_interpolation_factor": scaling.factor if linear else None,
        }


SAME_NAMES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "max_position_embeddings", "normalization",
)  # fmt: skip
OPTIONAL = (  # absent: our default
    "kv_channels", "make_vocab_size_divisible_by", "qk_layernorm", "qk_l2_norm", "softmax_type",
    "activation_func_clamp_value", "glu_linear_offset", "attention_output_gate",
    "untie_embeddings_and_output_weights", "hidden_dropout", "attention_dropout", "init_method_std",
)  # fmt: skip
EXPERTS = (
    "num_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate", "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk",
    "moe_router_enable_expert_bias", "moe_router_bias_update_rate", "moe_z_loss_coeff",
    "moe_expert_capacity_factor", "moe_token_drop_policy", "moe_grouped_gemm",
)  # fmt: skip

SETTINGS = (
    *(Field(name, name) for name in SAME_NAMES),
    *(Field(name, name, default=None) for name in OPTIONAL),
    Field("vocab_size", "vocab_size"),
    Field("layernorm_epsilon", "norm_epsilon", default=1e-5),
    Field("layernorm_zero_centered_gamma", "apply_layernorm_1p", default=False),
    _Groups(),
    _Activation(),
    _Biases(),
    _Experts(),
    _Positions(),
    Theirs(
        multi_latent_attention=False, mtp_num_layers=None, window_size=None,
        apply_residual_connection_post_layernorm=False,
    ),
)  # fmt: skip
GPT = Family(
    architecture="GPTModel",
    model_type="megatron",
    tensors=TENSORS,
    settings=SETTINGS,
    tied="output_layer.weight",
    prefix="",
)


class _Heads:
    """bert_binary_head, with which there are two segments and a pooler."""

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        binary = theirs.get("bert_binary_head", True)
        return {"bert_binary_head": binary, "add_pooler": binary, "num_tokentypes": 2 * binary}

    def write(self, model: ModelConfig) -> Tree:
        return {"bert_binary_head": model.bert_binary_head}


BERT = Family(
    architecture="BertModel",
    model_type="megatron-bert",
    tensors={
        **{
            name: same(rule.names[0].replace("decoder.", "encoder.", 1))
            for name, rule in TENSORS.items()
            if "softmax_offset" not in name and "router" not in name and "expert" not in name
        },
        "layers.{layer}.mlp.linear_fc1.weight": fc1("encoder.layers.{layer}.mlp.linear_fc1.weight"),
        "layers.{layer}.mlp.linear_fc1.bias": fc1("encoder.layers.{layer}.mlp.linear_fc1.bias"),
        "embedding.tokentype_embeddings.weight": same("embedding.tokentype_embeddings.weight"),
        **{
            f"{ours}.{kind}": same(f"{theirs}.{kind}")
            for ours, theirs in (
                ("lm_head.dense", "lm_head.dense"),
                ("lm_head.layernorm", "lm_head.layer_norm"),
                ("pooler", "pooler.dense"),
                ("binary_head", "binary_head"),
            )
            for kind in ("weight", "bias")
        },
        "lm_head.vocabulary.bias": same("output_layer.bias"),
    },
    settings=(
        *SETTINGS,
        _Heads(),
        Ours(model_type="bert", add_lm_head=True, lm_head_activation="gelu"),
        Theirs(num_experts=None, qk_layernorm=False, qk_l2_norm=False, softmax_type="vanilla"),
    ),
    tied="output_layer.weight",
    prefix="",
)


def family_of(model: ModelConfig) -> Family:
    """The one that a model of ours is written as."""
    return BERT if model.model_type == "bert" else GPT
