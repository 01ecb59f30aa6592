"""Megatron core's GPT model as a family: its tensors and its arguments, whose names are mostly ours.

Fused SwiGLU matrices hold the gate before the up, there; ours alternate. Queries, keys and values stand by group in
both. Transformer Engine keeps a norm with the matrix behind it; the reader gives it the name that it has without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.family import Family
from megalith.bridge.rows import RowRun, Rule, gate_up, same
from megalith.bridge.settings import Field, Theirs, Tree
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
    "layers.{layer}.mlp.linear_fc1.weight": fc1("decoder.layers.{layer}.mlp.linear_fc1.weight"),
    "layers.{layer}.mlp.linear_fc1.bias":   fc1("decoder.layers.{layer}.mlp.linear_fc1.bias"),
    "final_layernorm.weight":               same("decoder.final_layernorm.weight"),
    "final_layernorm.bias":                 same("decoder.final_layernorm.bias"),
    "output_layer.weight":                  same("output_layer.weight"),
}
FUSED_NORMS = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
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


class _Activation:
    """Without swiglu GELU: exact, or by tanh in Megatron's fused kernel and with openai_gelu."""

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        if theirs.get("swiglu"):
            return {"swiglu": True}
        by_tanh = theirs.get("openai_gelu") or theirs.get("bias_gelu_fusion", True)
        return {"activation": "gelu_tanh" if by_tanh else "gelu"}


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
        }
        if theirs.get("use_rope_scaling"):
            fields["rope_scaling"] = {"type": "llama3", "factor": theirs.get("rope_scaling_factor", 8.0)}
        elif theirs.get("rotary_seq_len_interpolation_factor"):
            fields["rope_scaling"] = {
                "type": "linear",
                "factor": theirs["rotary_seq_len_interpolation_factor"],
            }
        return fields


SAME_NAMES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "max_position_embeddings", "normalization",
)  # fmt: skip
OPTIONAL = (  # absent: our default
    "kv_channels", "make_vocab_size_divisible_by", "add_bias_linear", "add_qkv_bias", "qk_layernorm",
    "untie_embeddings_and_output_weights", "hidden_dropout", "attention_dropout", "init_method_std",
)  # fmt: skip

GPT = Family(
    architecture="GPTModel",
    model_type="megatron",
    tensors=TENSORS,
    settings=(
        *(Field(name, name) for name in SAME_NAMES),
        *(Field(name, name, default=None) for name in OPTIONAL),
        Field("vocab_size", "vocab_size"),
        Field("layernorm_epsilon", "norm_epsilon", default=1e-5),
        Field("layernorm_zero_centered_gamma", "apply_layernorm_1p", default=False),
        _Groups(),
        _Activation(),
        _Positions(),
        Theirs(
            num_experts=None, multi_latent_attention=False, mtp_num_layers=None, window_size=None, squared_relu=False,
            rotary_interleaved=False, quick_geglu=False, apply_residual_connection_post_layernorm=False,
        ),
    ),
    tied="output_layer.weight",
    prefix="",
)  # fmt: skip
