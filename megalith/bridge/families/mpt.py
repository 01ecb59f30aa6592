"""MPT of MosaicML: ALiBi, LayerNorm without biases, no biases in linear layers, one matrix for QKV.

transformers ignores several of config.json's keys that MosaicML's code reads, such as `expansion_ratio`. They must have
the values with which both compute the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.llama import TIED
from megalith.bridge.family import Family
from megalith.bridge.rows import qkv, same
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Tree
from megalith.config import ModelConfig
from megalith.errors import ConfigError

ATTENTION = RequiredKeys(
    attn_type="multihead_attention", clip_qkv=None, prefix_lm=False, qk_ln=False, attn_uses_sequence_id=False,
    alibi=True, alibi_bias_max=8,
)  # fmt: skip


class AttentionConfig:
    """Maps `attn_config`, an object with the attention keys. Its dropout rate applies to the whole model."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        attention = hf_config.get("attn_config") or {}
        dropout, scale = attention.get("attn_pdrop") or 0.0, attention.get("softmax_scale")
        fields = {"attention_dropout": dropout, "hidden_dropout": dropout}
        return ATTENTION.read(attention) | fields | ({} if scale is None else {"softmax_scale": scale})

    def write(self, model: ModelConfig) -> Tree:
        fields = {"attn_pdrop": model.attention_dropout or 0, "softmax_scale": model.softmax_scale}
        return {"attn_config": ATTENTION.write(model) | fields}


class Length:
    """Maps `max_seq_len`. A length of 1 is rejected because transformers then omits ALiBi."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        length = hf_config.get("max_seq_len", 2048)
        if length == 1:
            raise ConfigError(
                "config.json has max_seq_len 1, which makes transformers ignore positions; correct max_seq_len"
            )
        return {"max_position_embeddings": length}

    def write(self, model: ModelConfig) -> Tree:
        return {"max_seq_len": model.max_position_embeddings}


# fmt: off
BLOCK = "transformer.blocks.{layer}."
MPT = Family(
    architecture="MptForCausalLM",
    model_type="mpt",
    aliases={"num_attention_heads": "n_heads", "hidden_size": "d_model", "num_hidden_layers": "n_layers"},
    tensors={
        "embedding.word_embeddings.weight":
            same("transformer.wte.weight"),
        "layers.{layer}.input_layernorm.weight":
            same(f"{BLOCK}norm_1.weight"),
        "layers.{layer}.self_attention.linear_qkv.weight":
            qkv(f"{BLOCK}attn.Wqkv.weight"),
        "layers.{layer}.self_attention.linear_proj.weight":
            same(f"{BLOCK}attn.out_proj.weight"),
        "layers.{layer}.pre_mlp_layernorm.weight":
            same(f"{BLOCK}norm_2.weight"),
        "layers.{layer}.mlp.linear_fc1.weight":
            same(f"{BLOCK}ffn.up_proj.weight"),
        "layers.{layer}.mlp.linear_fc2.weight":
            same(f"{BLOCK}ffn.down_proj.weight"),
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
        Length(),
        Field("layernorm_epsilon", "layer_norm_epsilon", default=1e-5),
        Field("init_method_std", "initializer_range", default=0.02),
        TIED,
        AttentionConfig(),
        FixedSettings(position_embedding_type="alibi", normalization="LayerNorm", add_norm_bias=False,
                      activation="gelu", add_bias_linear=False),
        RequiredKeys(expansion_ratio=4, no_bias=True, logit_scale=None, resid_pdrop=0.0, emb_pdrop=0.0),
    ),
    tied="lm_head.weight",
    prefix="transformer.",
)
# fmt: on


FAMILIES = (MPT,)
