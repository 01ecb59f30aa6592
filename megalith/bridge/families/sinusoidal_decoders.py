"""Decoders with sinusoidal positions: XGLM and CTRL.

XGLM: OPT's layers; position 0 has the sinusoids of position 2. transformers sets the sinusoids of position
`pad_token_id` to 0. This has no effect only if `pad_token_id` is 0 or 1.

CTRL: ReLU, a bias of the output matrix, which is tied, and no dropout in attention. The epsilon of its layers' norms is
1e-6 whatever config.json says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.layernorm_decoders import GPT2_ALIASES, activation
from megalith.bridge.families.llama import TIED
from megalith.bridge.family import Family
from megalith.bridge.rows import qkv, same
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Tree
from megalith.config import ModelConfig
from megalith.errors import ConfigError


class PaddingBeforePositions:
    """Rejects a `pad_token_id` whose row of sinusoids belongs to a position in use."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        token = hf_config.get("pad_token_id", 1)
        if token not in (None, 0, 1):
            raise ConfigError(
                f"config.json has pad_token_id {token!r}, whose number transformers removes from the positions; only "
                "0, 1 and null are supported"
            )
        return {}

    def write(self, model: ModelConfig) -> Tree:
        return {"pad_token_id": 1}


# fmt: off
XGLM = Family(
    architecture="XGLMForCausalLM",
    model_type="xglm",
    aliases={"num_attention_heads": "attention_heads", "hidden_size": "d_model", "num_hidden_layers": "num_layers"},
    tensors={
        "embedding.word_embeddings.weight":
            same("model.embed_tokens.weight"),
        "layers.{layer}.input_layernorm.weight":
            same("model.layers.{layer}.self_attn_layer_norm.weight"),
        "layers.{layer}.input_layernorm.bias":
            same("model.layers.{layer}.self_attn_layer_norm.bias"),
        "layers.{layer}.self_attention.linear_qkv.weight":
            qkv("model.layers.{layer}.self_attn.q_proj.weight",
                "model.layers.{layer}.self_attn.k_proj.weight",
                "model.layers.{layer}.self_attn.v_proj.weight"),
        "layers.{layer}.self_attention.linear_qkv.bias":
            qkv("model.layers.{layer}.self_attn.q_proj.bias",
                "model.layers.{layer}.self_attn.k_proj.bias",
                "model.layers.{layer}.self_attn.v_proj.bias"),
        "layers.{layer}.self_attention.linear_proj.weight":
            same("model.layers.{layer}.self_attn.out_proj.weight"),
        "layers.{layer}.self_attention.linear_proj.bias":
            same("model.layers.{layer}.self_attn.out_proj.bias"),
        "layers.{layer}.pre_mlp_layernorm.weight":
            same("model.layers.{layer}.final_layer_norm.weight"),
        "layers.{layer}.pre_mlp_layernorm.bias":
            same("model.layers.{layer}.final_layer_norm.bias"),
        "layers.{layer}.mlp.linear_fc1.weight":
            same("model.layers.{layer}.fc1.weight"),
        "layers.{layer}.mlp.linear_fc1.bias":
            same("model.layers.{layer}.fc1.bias"),
        "layers.{layer}.mlp.linear_fc2.weight":
            same("model.layers.{layer}.fc2.weight"),
        "layers.{layer}.mlp.linear_fc2.bias":
            same("model.layers.{layer}.fc2.bias"),
        "final_layernorm.weight":
            same("model.layer_norm.weight"),
        "final_layernorm.bias":
            same("model.layer_norm.bias"),
        "output_layer.weight":
            same("lm_head.weight"),
    },
    settings=(
        Field("num_layers", "num_layers"),
        Field("hidden_size", "d_model"),
        Field("ffn_hidden_size", "ffn_dim", default=4096),
        Field("num_attention_heads", "attention_heads"),
        Field("vocab_size", "vocab_size"),
        Field("max_position_embeddings", "max_position_embeddings", default=2048),
        activation("activation_function", "gelu"),
        Field("scale_embeddings", "scale_embedding", default=True),
        Field("hidden_dropout", "dropout", default=0.1),
        Field("attention_dropout", "attention_dropout", default=0.1),
        Field("init_method_std", "init_std", default=0.02),
        TIED,
        FixedSettings(position_embedding_type="sinusoidal", sinusoidal_spacing="inclusive",
                      sinusoidal_first_position=2),
        PaddingBeforePositions(),
        RequiredKeys(add_cross_attention=False, layerdrop=0.0, activation_dropout=0.0),
    ),
    tied="lm_head.weight",
    ignored=(r"^model\.embed_positions\.weights$",),
)
CTRL = Family(
    architecture="CTRLLMHeadModel",
    model_type="ctrl",
    aliases=GPT2_ALIASES,
    tensors={
        "embedding.word_embeddings.weight":
            same("transformer.w.weight"),
        "layers.{layer}.input_layernorm.weight":
            same("transformer.h.{layer}.layernorm1.weight"),
        "layers.{layer}.input_layernorm.bias":
            same("transformer.h.{layer}.layernorm1.bias"),
        "layers.{layer}.self_attention.linear_qkv.weight":
            qkv("transformer.h.{layer}.multi_head_attention.Wq.weight",
                "transformer.h.{layer}.multi_head_attention.Wk.weight",
                "transformer.h.{layer}.multi_head_attention.Wv.weight"),
        "layers.{layer}.self_attention.linear_qkv.bias":
            qkv("transformer.h.{layer}.multi_head_attention.Wq.bias",
                "transformer.h.{layer}.multi_head_attention.Wk.bias",
                "transformer.h.{layer}.multi_head_attention.Wv.bias"),
        "layers.{layer}.self_attention.linear_proj.weight":
            same("transformer.h.{layer}.multi_head_attention.dense.weight"),
        "layers.{layer}.self_attention.linear_proj.bias":
            same("transformer.h.{layer}.multi_head_attention.dense.bias"),
        "layers.{layer}.pre_mlp_layernorm.weight":
            same("transformer.h.{layer}.layernorm2.weight"),
        "layers.{layer}.pre_mlp_layernorm.bias":
            same("transformer.h.{layer}.layernorm2.bias"),
        "layers.{layer}.mlp.linear_fc1.weight":
            same("transformer.h.{layer}.ffn.0.weight"),
        "layers.{layer}.mlp.linear_fc1.bias":
            same("transformer.h.{layer}.ffn.0.bias"),
        "layers.{layer}.mlp.linear_fc2.weight":
            same("transformer.h.{layer}.ffn.2.weight"),
        "layers.{layer}.mlp.linear_fc2.bias":
            same("transformer.h.{layer}.ffn.2.bias"),
        "final_layernorm.weight":
            same("transformer.layernorm.weight"),
        "final_layernorm.bias":
            same("transformer.layernorm.bias"),
        "output_layer.weight":
            same("lm_head.weight"),
        "vocabulary.bias":
            same("lm_head.bias"),
    },
    settings=(
        Field("num_layers", "n_layer"),
        Field("hidden_size", "n_embd"),
        Field("ffn_hidden_size", "dff", default=8192),
        Field("num_attention_heads", "n_head"),
        Field("vocab_size", "vocab_size"),
        Field("max_position_embeddings", "n_positions", default=256),
        Field("layernorm_epsilon", "layer_norm_epsilon", default=1e-6),
        Field("hidden_dropout", "resid_pdrop", default=0.1),
        Field("hidden_dropout", "embd_pdrop", default=0.1),
        Field("init_method_std", "initializer_range", default=0.02),
        TIED,
        FixedSettings(position_embedding_type="sinusoidal", scale_embeddings=True, activation="relu",
                      attention_dropout=0.0, add_output_bias=True),
        RequiredKeys(layer_norm_epsilon=1e-6),
    ),
    tied="lm_head.weight",
    prefix="transformer.",
    ignored=(r"^transformer\.pos_encoding$",),
)
# fmt: on

FAMILIES = (XGLM, CTRL)
