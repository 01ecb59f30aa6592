"""DBRX: experts in every layer, clamped queries, keys and values, LayerNorm without biases.

The keys of attention and experts are in two objects, `attn_config` and `ffn_config`. A tensor contains the matrices of
all experts, concatenated by rows. The published models have the base of RoPE in `attn_config`; transformers 5.24 reads
it only from `rope_parameters`. Files with two different bases are therefore rejected.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from megalith.bridge.family import Family
from megalith.bridge.rope_settings import Rope, rope_settings
from megalith.bridge.rows import gate_up, qkv, same, stacked
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, TrainingNoise, Tree
from megalith.config import ModelConfig
from megalith.errors import ConfigError

BASE = 10000.0


class Nested:
    """Applies mapping rules to a nested object of config.json."""

    def __init__(self, key: str, *rows: Any):
        self._key, self._rows = key, rows

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        inner, fields = hf_config.get(self._key) or {}, {}
        for row in self._rows:
            fields |= row.read(inner)
        return fields

    def write(self, model: ModelConfig) -> Tree:
        inner: Tree = {}
        for row in self._rows:
            inner |= row.write(model)
        return {self._key: inner}


class ExpertWeights:
    """Maps `moe_normalize_expert_weights`: 1 divides a token's expert weights by their sum, null keeps the softmax."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        if hf_config.get("uniform_expert_assignment"):
            raise ConfigError(
                "config.json has uniform_expert_assignment true, which ignores the router and is not supported; remove "
                "it"
            )
        order = hf_config.get("moe_normalize_expert_weights", 1.0)
        if order not in (None, 1):
            raise ConfigError(
                f"config.json has moe_normalize_expert_weights {order!r}, but the only supported values are 1 "
                "(divide a token's weights by their sum) and null"
            )
        return {"moe_router_pre_softmax": order is None}

    def write(self, model: ModelConfig) -> Tree:
        return {"moe_normalize_expert_weights": None if model.moe_router_pre_softmax else 1.0}


class Gate:
    """Checks that the activation in `ffn_act_fn` is `silu`."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        activation = hf_config.get("ffn_act_fn")
        if activation is not None and activation != {"name": "silu"}:
            raise ConfigError(
                f"config.json has ffn_act_fn {activation!r}, but models of this family are supported only with "
                "{'name': 'silu'}"
            )
        return {}

    def write(self, model: ModelConfig) -> Tree:
        return {"ffn_act_fn": {"name": "silu"}}


class DbrxRope:
    """Maps the RoPE base, which transformers reads from `rope_parameters` and other loaders from `attn_config`."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        rope, attention = rope_settings(hf_config), hf_config.get("attn_config") or {}
        base = rope.get("rope_theta") or hf_config.get("rope_theta") or (BASE if rope else None)
        other = attention.get("rope_theta")
        if base is not None and other is not None and base != other:
            raise ConfigError(
                f"config.json has rope_theta {other} in attn_config, and {base} in rope_parameters or by "
                "default, and loaders disagree on which of the two is used; write the right one into both"
            )
        if base is None and other not in (None, BASE):
            warnings.warn(
                f"config.json has rope_theta {other} only in attn_config, where transformers 5.24 does not read it: it "
                f"computes with {BASE}, Megalith and the model's own code with {other}",
                stacklevel=4,
            )
        rope["rope_theta"] = base or other or BASE
        return Rope().read({**hf_config, "rope_parameters": rope, "rope_scaling": None})

    def write(self, model: ModelConfig) -> Tree:
        return Rope().write(model)


class AttentionBase:
    """Writes the RoPE base into `attn_config`, without which transformers 5.24 cannot build the model."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        return {}

    def write(self, model: ModelConfig) -> Tree:
        return {"rope_theta": model.rotary_base}


# fmt: off
BLOCK = "transformer.blocks.{layer}."
MLP = f"{BLOCK}ffn.experts.mlp."
DBRX = Family(
    architecture="DbrxForCausalLM",
    model_type="dbrx",
    aliases={"num_attention_heads": "n_heads", "hidden_size": "d_model", "num_hidden_layers": "n_layers",
             "max_position_embeddings": "max_seq_len"},
    tensors={
        "embedding.word_embeddings.weight":
            same("transformer.wte.weight"),
        "layers.{layer}.input_layernorm.weight":
            same(f"{BLOCK}norm_attn_norm.norm_1.weight"),
        "layers.{layer}.self_attention.linear_qkv.weight":
            qkv(f"{BLOCK}norm_attn_norm.attn.Wqkv.weight"),
        "layers.{layer}.self_attention.linear_proj.weight":
            same(f"{BLOCK}norm_attn_norm.attn.out_proj.weight"),
        "layers.{layer}.pre_mlp_layernorm.weight":
            same(f"{BLOCK}norm_attn_norm.norm_2.weight"),
        "layers.{layer}.mlp.router.weight":
            same(f"{BLOCK}ffn.router.layer.weight"),
        "layers.{layer}.mlp.experts.linear_fc1.weight":
            stacked(gate_up(f"{MLP}w1", f"{MLP}v1"), flat=True),
        "layers.{layer}.mlp.experts.linear_fc2.weight":
            stacked(same(f"{MLP}w2"), transposed=True, flat=True),
        "final_layernorm.weight":
            same("transformer.norm_f.weight"),
        "output_layer.weight":
            same("lm_head.weight"),
    },
    settings=(
        Field("num_layers", "n_layers"),
        Field("hidden_size", "d_model"),
        Field("num_attention_heads", "n_heads"),
        Field("vocab_size", "vocab_size"),
        Field("max_position_embeddings", "max_seq_len", default=2048),
        Field("init_method_std", "initializer_range", default=0.02),
        Field("hidden_dropout", "resid_pdrop", default=0.0),
        Field("hidden_dropout", "emb_pdrop", default=0.0),
        DbrxRope(),
        Nested(
            "attn_config",
            Field("num_query_groups", "kv_n_heads", default=1),
            Field("clip_qkv", "clip_qkv", default=None),
            Field("attention_dropout", "attn_pdrop", default=0.0),
            AttentionBase(),
        ),
        Nested(
            "ffn_config",
            Field("ffn_hidden_size", "ffn_hidden_size", default=3584),
            Field("num_experts", "moe_num_experts", default=4),
            Field("moe_router_topk", "moe_top_k", default=1),
            ExpertWeights(),
            Gate(),
            TrainingNoise("moe_jitter_eps"),
        ),
        FixedSettings(normalization="LayerNorm", add_norm_bias=False, layernorm_epsilon=1e-5, swiglu=True,
                      add_bias_linear=False, untie_embeddings_and_output_weights=True),
        RequiredKeys(tie_word_embeddings=False),
    ),
    tied="lm_head.weight",
    prefix="transformer.",
)
# fmt: on

FAMILIES = (DBRX,)
