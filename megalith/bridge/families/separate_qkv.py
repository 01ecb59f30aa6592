"""Decoders with LayerNorm and separate query, key and value matrices.

StarCoder2: MLP without a gate, biases, GQA; some releases have a sliding window.

StableLM: Llama with LayerNorm and partial RoPE; some releases have a parallel residual with one norm.

Phi and GPT-J: parallel residual with one norm, partial RoPE, a bias of the output matrix. GPT-J has no attention biases
and interleaved RoPE.

OPT: learned positions, ReLU. Its position table starts with two rows for padding, which are last in Megalith. OPT-350M
is rejected: it has post-norm layers and embeddings of another width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.layernorm_decoders import GPT2_ALIASES, GPT2_SETTINGS, SIZES, activation, biases
from megalith.bridge.families.llama import IGNORED, TENSORS, TIED, UNTIED
from megalith.bridge.family import Family
from megalith.bridge.rope_settings import PartialRope, Rope
from megalith.bridge.rows import first_last, interleaved_qkv, qkv, same
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Tree, Window
from megalith.config import ModelConfig
from megalith.errors import ConfigError

# fmt: off
ROWS = {
    **TENSORS,
    "layers.{layer}.input_layernorm.bias":
        same("model.layers.{layer}.input_layernorm.bias"),
    "layers.{layer}.pre_mlp_layernorm.bias":
        same("model.layers.{layer}.post_attention_layernorm.bias"),
    "final_layernorm.bias":
        same("model.norm.bias"),
}

STARCODER2 = Family(
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    defaults={"num_key_value_heads": 2},
    tensors={
        **ROWS,
        "layers.{layer}.mlp.linear_fc1.weight":
            same("model.layers.{layer}.mlp.c_fc.weight"),
        "layers.{layer}.mlp.linear_fc1.bias":
            same("model.layers.{layer}.mlp.c_fc.bias"),
        "layers.{layer}.mlp.linear_fc2.weight":
            same("model.layers.{layer}.mlp.c_proj.weight"),
        "layers.{layer}.mlp.linear_fc2.bias":
            same("model.layers.{layer}.mlp.c_proj.bias"),
    },
    settings=(
        *SIZES,
        Field("ffn_hidden_size", "intermediate_size"),
        Field("max_position_embeddings", "max_position_embeddings"),
        Field("num_query_groups", "num_key_value_heads"),
        Field("kv_channels", "head_dim", default=None),
        Field("layernorm_epsilon", "norm_epsilon", default=1e-5),
        activation("hidden_act", "gelu_pytorch_tanh", tanh="gelu_pytorch_tanh"),
        Field("hidden_dropout", "residual_dropout", default=0.0),
        Field("hidden_dropout", "embedding_dropout", default=0.0),
        Field("init_method_std", "initializer_range", default=0.018042),
        *biases("use_bias", True),
        TIED,
        Rope(),
        Window(default=None),
        FixedSettings(add_bias_linear=False),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

STABLELM = Family(
    architecture="StableLmForCausalLM",
    model_type="stablelm",
    defaults={"num_key_value_heads": 32},
    tensors=ROWS,
    settings=(
        *SIZES,
        Field("ffn_hidden_size", "intermediate_size"),
        Field("max_position_embeddings", "max_position_embeddings"),
        Field("num_query_groups", "num_key_value_heads"),
        Field("layernorm_epsilon", "layer_norm_eps", default=1e-5),
        Field("hidden_dropout", "hidden_dropout", default=0.0),
        Field("init_method_std", "initializer_range", default=0.02),
        Field("add_qkv_bias", "use_qkv_bias", default=False),
        Field("parallel_attn_mlp", "use_parallel_residual", default=False),
        Field("shared_layernorm", "use_parallel_residual", default=False),
        UNTIED,
        PartialRope(0.25),
        FixedSettings(swiglu=True, add_bias_linear=False),
        RequiredKeys(hidden_act="silu", qk_layernorm=False),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on


# fmt: off
PHI = Family(
    architecture="PhiForCausalLM",
    model_type="phi",
    tensors={
        **ROWS,
        "layers.{layer}.self_attention.linear_proj.weight":
            same("model.layers.{layer}.self_attn.dense.weight"),
        "layers.{layer}.self_attention.linear_proj.bias":
            same("model.layers.{layer}.self_attn.dense.bias"),
        "layers.{layer}.mlp.linear_fc1.weight":
            same("model.layers.{layer}.mlp.fc1.weight"),
        "layers.{layer}.mlp.linear_fc1.bias":
            same("model.layers.{layer}.mlp.fc1.bias"),
        "layers.{layer}.mlp.linear_fc2.weight":
            same("model.layers.{layer}.mlp.fc2.weight"),
        "layers.{layer}.mlp.linear_fc2.bias":
            same("model.layers.{layer}.mlp.fc2.bias"),
        "final_layernorm.weight":
            same("model.final_layernorm.weight"),
        "final_layernorm.bias":
            same("model.final_layernorm.bias"),
        "vocabulary.bias":
            same("lm_head.bias"),
    },
    settings=(
        *SIZES,
        Field("ffn_hidden_size", "intermediate_size"),
        Field("max_position_embeddings", "max_position_embeddings"),
        Field("num_query_groups", "num_key_value_heads", default=None),
        Field("layernorm_epsilon", "layer_norm_eps", default=1e-5),
        activation("hidden_act", "gelu_new"),
        Field("hidden_dropout", "resid_pdrop", default=0.0),
        Field("hidden_dropout", "embd_pdrop", default=0.0),
        Field("init_method_std", "initializer_range", default=0.02),
        UNTIED,
        PartialRope(0.5),
        FixedSettings(parallel_attn_mlp=True, shared_layernorm=True, add_output_bias=True),
        RequiredKeys(qk_layernorm=False),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on


class RotaryDimensions:
    """Maps `rotary_dim`, the number of rotary dimensions per head. The RoPE base is GPT-J's constant."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        size, rotary = hf_config["n_embd"] // (hf_config["n_head"] or 1), hf_config.get("rotary_dim", 64)
        if not rotary or rotary > size:
            raise ConfigError(
                f"config.json has rotary_dim {rotary}, but a head has {size} dimensions; set rotary_dim to a "
                f"number from 1 to {size}"
            )
        share = rotary / size
        if int(size * share) != rotary:  # rounding error
            share = math.nextafter(share, 1.0)
        return {"position_embedding_type": "rope", "rotary_base": 10000.0, "rotary_percent": share}

    def write(self, model: ModelConfig) -> Tree:
        return {"rotary_dim": model.rotary_size}


# fmt: off
GPT_J = Family(
    architecture="GPTJForCausalLM",
    model_type="gptj",
    aliases=GPT2_ALIASES,
    defaults={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    tensors={
        "embedding.word_embeddings.weight":
            same("transformer.wte.weight"),
        "layers.{layer}.input_layernorm.weight":
            same("transformer.h.{layer}.ln_1.weight"),
        "layers.{layer}.input_layernorm.bias":
            same("transformer.h.{layer}.ln_1.bias"),
        "layers.{layer}.self_attention.linear_qkv.weight":
            interleaved_qkv("transformer.h.{layer}.attn.q_proj.weight",
                        "transformer.h.{layer}.attn.k_proj.weight",
                        "transformer.h.{layer}.attn.v_proj.weight"),
        "layers.{layer}.self_attention.linear_proj.weight":
            same("transformer.h.{layer}.attn.out_proj.weight"),
        "layers.{layer}.mlp.linear_fc1.weight":
            same("transformer.h.{layer}.mlp.fc_in.weight"),
        "layers.{layer}.mlp.linear_fc1.bias":
            same("transformer.h.{layer}.mlp.fc_in.bias"),
        "layers.{layer}.mlp.linear_fc2.weight":
            same("transformer.h.{layer}.mlp.fc_out.weight"),
        "layers.{layer}.mlp.linear_fc2.bias":
            same("transformer.h.{layer}.mlp.fc_out.bias"),
        "final_layernorm.weight":
            same("transformer.ln_f.weight"),
        "final_layernorm.bias":
            same("transformer.ln_f.bias"),
        "output_layer.weight":
            same("lm_head.weight"),
        "vocabulary.bias":
            same("lm_head.bias"),
    },
    settings=(
        *GPT2_SETTINGS,
        UNTIED,
        RotaryDimensions(),
        FixedSettings(parallel_attn_mlp=True, shared_layernorm=True, add_bias_linear=False, add_mlp_bias=True,
             add_output_bias=True),
    ),
    tied="lm_head.weight",
    ignored=(r"\.attn\.(masked_)?bias$",),
    prefix="transformer.",
)
# fmt: on


class PaddedPositions:
    """Maps `max_position_embeddings` of families whose position embedding starts with two padding rows.

    Args:
        default: value of a missing key.
        counted: True if the key's value includes the two rows (RoBERTa), False if not (OPT).
    """

    def __init__(self, default: int = 2048, counted: bool = False):
        self._default, self._counted = default, PADDING_POSITIONS if counted else 0

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        positions = hf_config.get("max_position_embeddings")
        positions = (self._default if positions is None else positions) - self._counted
        if positions < 1:
            raise ConfigError(
                f"config.json has max_position_embeddings {positions + self._counted}, and {self._counted} of them are "
                f"for padding, but a text needs at least one; use {self._counted + 1} or more"
            )
        return {"max_position_embeddings": positions, "padding_positions": PADDING_POSITIONS}

    def write(self, model: ModelConfig) -> Tree:
        return {"max_position_embeddings": model.max_position_embeddings + self._counted}


class EmbeddingWidth:
    """Checks that `word_embed_proj_dim`, the embedding's width, equals the layers' width."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        width, hidden = hf_config.get("word_embed_proj_dim"), hf_config.get("hidden_size")
        if width not in (None, hidden):
            raise ConfigError(
                f"config.json has word_embed_proj_dim {width} and hidden_size {hidden}, but embeddings must be as "
                "wide as the layers (of the OPT models, only OPT-350M differs)"
            )
        return {}

    def write(self, model: ModelConfig) -> Tree:
        return {"word_embed_proj_dim": model.hidden_size}


PADDING_POSITIONS = 2

# fmt: off
OPT = Family(
    architecture="OPTForCausalLM",
    model_type="opt",
    tensors={
        "embedding.word_embeddings.weight":
            same("model.decoder.embed_tokens.weight"),
        "embedding.position_embeddings.weight":
            first_last("model.decoder.embed_positions.weight", PADDING_POSITIONS),
        "layers.{layer}.input_layernorm.weight":
            same("model.decoder.layers.{layer}.self_attn_layer_norm.weight"),
        "layers.{layer}.input_layernorm.bias":
            same("model.decoder.layers.{layer}.self_attn_layer_norm.bias"),
        "layers.{layer}.self_attention.linear_qkv.weight":
            qkv("model.decoder.layers.{layer}.self_attn.q_proj.weight",
                "model.decoder.layers.{layer}.self_attn.k_proj.weight",
                "model.decoder.layers.{layer}.self_attn.v_proj.weight"),
        "layers.{layer}.self_attention.linear_qkv.bias":
            qkv("model.decoder.layers.{layer}.self_attn.q_proj.bias",
                "model.decoder.layers.{layer}.self_attn.k_proj.bias",
                "model.decoder.layers.{layer}.self_attn.v_proj.bias"),
        "layers.{layer}.self_attention.linear_proj.weight":
            same("model.decoder.layers.{layer}.self_attn.out_proj.weight"),
        "layers.{layer}.self_attention.linear_proj.bias":
            same("model.decoder.layers.{layer}.self_attn.out_proj.bias"),
        "layers.{layer}.pre_mlp_layernorm.weight":
            same("model.decoder.layers.{layer}.final_layer_norm.weight"),
        "layers.{layer}.pre_mlp_layernorm.bias":
            same("model.decoder.layers.{layer}.final_layer_norm.bias"),
        "layers.{layer}.mlp.linear_fc1.weight":
            same("model.decoder.layers.{layer}.fc1.weight"),
        "layers.{layer}.mlp.linear_fc1.bias":
            same("model.decoder.layers.{layer}.fc1.bias"),
        "layers.{layer}.mlp.linear_fc2.weight":
            same("model.decoder.layers.{layer}.fc2.weight"),
        "layers.{layer}.mlp.linear_fc2.bias":
            same("model.decoder.layers.{layer}.fc2.bias"),
        "final_layernorm.weight":
            same("model.decoder.final_layer_norm.weight"),
        "final_layernorm.bias":
            same("model.decoder.final_layer_norm.bias"),
        "output_layer.weight":
            same("lm_head.weight"),
    },
    settings=(
        *SIZES,
        PaddedPositions(),
        Field("ffn_hidden_size", "ffn_dim"),
        activation("activation_function", "relu"),
        Field("hidden_dropout", "dropout", default=0.1),
        Field("init_method_std", "init_std", default=0.02),
        *biases("enable_bias", True),
        TIED,
        EmbeddingWidth(),
        FixedSettings(position_embedding_type="learned_absolute", positions_skip_padding=True, layernorm_epsilon=1e-5,
             add_bias_linear=False),
        RequiredKeys(do_layer_norm_before=True, _remove_final_layer_norm=False, layer_norm_elementwise_affine=True,
               layerdrop=0.0),
    ),
    tied="lm_head.weight",
)
# fmt: on


FAMILIES = (STARCODER2, STABLELM, PHI, GPT_J, OPT)
