"""Decoders with LayerNorm and a fused QKV matrix: GPT-2, BLOOM, GPT-NeoX (and Pythia) and Falcon.

GPT-2: matrices stored as [in, out]; all queries, then all keys, then all values. The others store QKV by group, as
Megalith does.

BLOOM: ALiBi, a norm after the embedding.

GPT-NeoX: parallel residual, partial RoPE.

Falcon: parallel residual with two norms (40B) or one (7B, with MQA; 11B); the names depend on the number of norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.llama import TIED, UNTIED
from megalith.bridge.family import Family
from megalith.bridge.rope_settings import PartialRope, Rope
from megalith.bridge.rows import Rule, qkv, same, transposed
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Tree
from megalith.config import ModelConfig
from megalith.errors import ConfigError


def activation(key: str, default: str, tanh: str = "gelu_new") -> Field:
    """Return the mapping rule of an ungated MLP's activation. `tanh` is the spelling to write for gelu_tanh."""
    named = dict.fromkeys((tanh, "gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh")
    others = {
        "gelu": "gelu",
        "quick_gelu": "quick_gelu",
        "relu": "relu",
        "relu2": "squared_relu",
        "silu": "silu",
    }
    return Field("activation", key, default=default, values=named | others)


class CheckHeadDim:
    """Checks `head_dim`, which transformers uses for RoPE although the head size is hidden_size / heads."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        size = hf_config["hidden_size"] // (hf_config["num_attention_heads"] or 1)
        if hf_config.get("head_dim") not in (None, size):
            raise ConfigError(
                f"config.json has head_dim {hf_config['head_dim']}, but a head's size is {size} (hidden_size / "
                "num_attention_heads) in models of this family; remove head_dim"
            )
        return {}

    def write(self, model: ModelConfig) -> Tree:
        return {}


def biases(key: str, default: bool) -> tuple[Field, ...]:
    """Return the mapping rules from one config.json key to add_qkv_bias, add_proj_bias and add_mlp_bias.

    Args:
        key: key in config.json.
        default: the value if config.json omits the key.
    """
    names = ("add_qkv_bias", "add_proj_bias", "add_mlp_bias")
    return tuple(Field(name, key, default=default) for name in names)


# fmt: off
SIZES = (
    Field("num_layers", "num_hidden_layers"),
    Field("hidden_size", "hidden_size"),
    Field("num_attention_heads", "num_attention_heads"),
    Field("vocab_size", "vocab_size"),
    Field("attention_dropout", "attention_dropout", default=0.0),
)

GPT2_TENSORS = {
    "embedding.word_embeddings.weight":
        same("transformer.wte.weight"),
    "embedding.position_embeddings.weight":
        same("transformer.wpe.weight"),
    "layers.{layer}.input_layernorm.weight":
        same("transformer.h.{layer}.ln_1.weight"),
    "layers.{layer}.input_layernorm.bias":
        same("transformer.h.{layer}.ln_1.bias"),
    "layers.{layer}.self_attention.linear_qkv.weight":
        qkv("transformer.h.{layer}.attn.c_attn.weight", transposed=True),
    "layers.{layer}.self_attention.linear_qkv.bias":
        qkv("transformer.h.{layer}.attn.c_attn.bias"),
    "layers.{layer}.self_attention.linear_proj.weight":
        transposed("transformer.h.{layer}.attn.c_proj.weight"),
    "layers.{layer}.self_attention.linear_proj.bias":
        same("transformer.h.{layer}.attn.c_proj.bias"),
    "layers.{layer}.pre_mlp_layernorm.weight":
        same("transformer.h.{layer}.ln_2.weight"),
    "layers.{layer}.pre_mlp_layernorm.bias":
        same("transformer.h.{layer}.ln_2.bias"),
    "layers.{layer}.mlp.linear_fc1.weight":
        transposed("transformer.h.{layer}.mlp.c_fc.weight"),
    "layers.{layer}.mlp.linear_fc1.bias":
        same("transformer.h.{layer}.mlp.c_fc.bias"),
    "layers.{layer}.mlp.linear_fc2.weight":
        transposed("transformer.h.{layer}.mlp.c_proj.weight"),
    "layers.{layer}.mlp.linear_fc2.bias":
        same("transformer.h.{layer}.mlp.c_proj.bias"),
    "final_layernorm.weight":
        same("transformer.ln_f.weight"),
    "final_layernorm.bias":
        same("transformer.ln_f.bias"),
    "output_layer.weight":
        same("lm_head.weight"),
}

GPT2_SETTINGS = (
    Field("num_layers", "n_layer"),
    Field("hidden_size", "n_embd"),
    Field("ffn_hidden_size", "n_inner", default=None),
    Field("num_attention_heads", "n_head"),
    Field("vocab_size", "vocab_size"),
    Field("max_position_embeddings", "n_positions"),
    Field("layernorm_epsilon", "layer_norm_epsilon", default=1e-5),
    activation("activation_function", "gelu_new"),
    Field("hidden_dropout", "resid_pdrop", default=0.1),
    Field("hidden_dropout", "embd_pdrop", default=0.1),
    Field("attention_dropout", "attn_pdrop", default=0.1),
    Field("init_method_std", "initializer_range", default=0.02),
)

GPT2_ALIASES = {"hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
                "num_hidden_layers": "n_layer"}

GPT2 = Family(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    other_model_types=("gpt-sw3",),
    tensors=GPT2_TENSORS,
    settings=(
        *GPT2_SETTINGS,
        TIED,
        FixedSettings(position_embedding_type="learned_absolute"),
        RequiredKeys(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False),
    ),
    tied="lm_head.weight",
    aliases=GPT2_ALIASES,
    ignored=(r"\.attn\.(masked_)?bias$",),
    prefix="transformer.",
)
# fmt: on


# fmt: off
BLOOM_TENSORS = {
    "embedding.word_embeddings.weight":
        same("transformer.word_embeddings.weight"),
    "embedding.layernorm.weight":
        same("transformer.word_embeddings_layernorm.weight"),
    "embedding.layernorm.bias":
        same("transformer.word_embeddings_layernorm.bias"),
    "layers.{layer}.input_layernorm.weight":
        same("transformer.h.{layer}.input_layernorm.weight"),
    "layers.{layer}.input_layernorm.bias":
        same("transformer.h.{layer}.input_layernorm.bias"),
    "layers.{layer}.self_attention.linear_qkv.weight":
        same("transformer.h.{layer}.self_attention.query_key_value.weight"),
    "layers.{layer}.self_attention.linear_qkv.bias":
        same("transformer.h.{layer}.self_attention.query_key_value.bias"),
    "layers.{layer}.self_attention.linear_proj.weight":
        same("transformer.h.{layer}.self_attention.dense.weight"),
    "layers.{layer}.self_attention.linear_proj.bias":
        same("transformer.h.{layer}.self_attention.dense.bias"),
    "layers.{layer}.pre_mlp_layernorm.weight":
        same("transformer.h.{layer}.post_attention_layernorm.weight"),
    "layers.{layer}.pre_mlp_layernorm.bias":
        same("transformer.h.{layer}.post_attention_layernorm.bias"),
    "layers.{layer}.mlp.linear_fc1.weight":
        same("transformer.h.{layer}.mlp.dense_h_to_4h.weight"),
    "layers.{layer}.mlp.linear_fc1.bias":
        same("transformer.h.{layer}.mlp.dense_h_to_4h.bias"),
    "layers.{layer}.mlp.linear_fc2.weight":
        same("transformer.h.{layer}.mlp.dense_4h_to_h.weight"),
    "layers.{layer}.mlp.linear_fc2.bias":
        same("transformer.h.{layer}.mlp.dense_4h_to_h.bias"),
    "final_layernorm.weight":
        same("transformer.ln_f.weight"),
    "final_layernorm.bias":
        same("transformer.ln_f.bias"),
    "output_layer.weight":
        same("lm_head.weight"),
}

BLOOM = Family(
    architecture="BloomForCausalLM",
    model_type="bloom",
    tensors=BLOOM_TENSORS,
    settings=(
        Field("num_layers", "n_layer", alias="num_hidden_layers"),
        Field("hidden_size", "hidden_size", alias="n_embed"),
        Field("num_attention_heads", "n_head", alias="num_attention_heads"),
        Field("vocab_size", "vocab_size"),
        Field("max_position_embeddings", "seq_length", default=None),
        Field("layernorm_epsilon", "layer_norm_epsilon", default=1e-5),
        Field("hidden_dropout", "hidden_dropout", default=0.0),
        Field("attention_dropout", "attention_dropout", default=0.0),
        Field("init_method_std", "initializer_range", default=0.02),
        TIED,
        FixedSettings(position_embedding_type="alibi", embedding_layernorm=True, activation="gelu_tanh"),
        RequiredKeys(apply_residual_connection_post_layernorm=False),
    ),
    tied="lm_head.weight",
    prefix="transformer.",
)
# fmt: on


# fmt: off
NEOX_TENSORS = {
    "embedding.word_embeddings.weight":
        same("gpt_neox.embed_in.weight"),
    "layers.{layer}.input_layernorm.weight":
        same("gpt_neox.layers.{layer}.input_layernorm.weight"),
    "layers.{layer}.input_layernorm.bias":
        same("gpt_neox.layers.{layer}.input_layernorm.bias"),
    "layers.{layer}.self_attention.linear_qkv.weight":
        same("gpt_neox.layers.{layer}.attention.query_key_value.weight"),
    "layers.{layer}.self_attention.linear_qkv.bias":
        same("gpt_neox.layers.{layer}.attention.query_key_value.bias"),
    "layers.{layer}.self_attention.linear_proj.weight":
        same("gpt_neox.layers.{layer}.attention.dense.weight"),
    "layers.{layer}.self_attention.linear_proj.bias":
        same("gpt_neox.layers.{layer}.attention.dense.bias"),
    "layers.{layer}.pre_mlp_layernorm.weight":
        same("gpt_neox.layers.{layer}.post_attention_layernorm.weight"),
    "layers.{layer}.pre_mlp_layernorm.bias":
        same("gpt_neox.layers.{layer}.post_attention_layernorm.bias"),
    "layers.{layer}.mlp.linear_fc1.weight":
        same("gpt_neox.layers.{layer}.mlp.dense_h_to_4h.weight"),
    "layers.{layer}.mlp.linear_fc1.bias":
        same("gpt_neox.layers.{layer}.mlp.dense_h_to_4h.bias"),
    "layers.{layer}.mlp.linear_fc2.weight":
        same("gpt_neox.layers.{layer}.mlp.dense_4h_to_h.weight"),
    "layers.{layer}.mlp.linear_fc2.bias":
        same("gpt_neox.layers.{layer}.mlp.dense_4h_to_h.bias"),
    "final_layernorm.weight":
        same("gpt_neox.final_layer_norm.weight"),
    "final_layernorm.bias":
        same("gpt_neox.final_layer_norm.bias"),
    "output_layer.weight":
        same("embed_out.weight"),
}


GPT_NEOX = Family(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    tensors=NEOX_TENSORS,
    settings=(
        *SIZES,
        Field("ffn_hidden_size", "intermediate_size"),
        Field("max_position_embeddings", "max_position_embeddings"),
        Field("layernorm_epsilon", "layer_norm_eps", default=1e-5),
        activation("hidden_act", "gelu", tanh="gelu_fast"),
        Field("hidden_dropout", "hidden_dropout", default=0.0),
        Field("init_method_std", "initializer_range", default=0.02),
        Field("parallel_attn_mlp", "use_parallel_residual", default=True),
        Field("add_qkv_bias", "attention_bias", default=True),
        Field("add_proj_bias", "attention_bias", default=True),
        UNTIED,
        PartialRope(0.25, share="rotary_pct", base="rotary_emb_base"),
        CheckHeadDim(),
        FixedSettings(add_bias_linear=False, add_mlp_bias=True),
    ),
    tied="embed_out.weight",
    ignored=(r"\.attention\.(masked_)?bias$", r"rotary_emb\.inv_freq$"),
    prefix="gpt_neox.",
)


FALCON_TENSORS = {
    "embedding.word_embeddings.weight":
        same("transformer.word_embeddings.weight"),
    "layers.{layer}.input_layernorm.weight":
        same("transformer.h.{layer}.ln_attn.weight"),
    "layers.{layer}.input_layernorm.bias":
        same("transformer.h.{layer}.ln_attn.bias"),
    "layers.{layer}.self_attention.linear_qkv.weight":
        same("transformer.h.{layer}.self_attention.query_key_value.weight"),
    "layers.{layer}.self_attention.linear_qkv.bias":
        same("transformer.h.{layer}.self_attention.query_key_value.bias"),
    "layers.{layer}.self_attention.linear_proj.weight":
        same("transformer.h.{layer}.self_attention.dense.weight"),
    "layers.{layer}.self_attention.linear_proj.bias":
        same("transformer.h.{layer}.self_attention.dense.bias"),
    "layers.{layer}.pre_mlp_layernorm.weight":
        same("transformer.h.{layer}.ln_mlp.weight"),
    "layers.{layer}.pre_mlp_layernorm.bias":
        same("transformer.h.{layer}.ln_mlp.bias"),
    "layers.{layer}.mlp.linear_fc1.weight":
        same("transformer.h.{layer}.mlp.dense_h_to_4h.weight"),
    "layers.{layer}.mlp.linear_fc1.bias":
        same("transformer.h.{layer}.mlp.dense_h_to_4h.bias"),
    "layers.{layer}.mlp.linear_fc2.weight":
        same("transformer.h.{layer}.mlp.dense_4h_to_h.weight"),
    "layers.{layer}.mlp.linear_fc2.bias":
        same("transformer.h.{layer}.mlp.dense_4h_to_h.bias"),
    "final_layernorm.weight":
        same("transformer.ln_f.weight"),
    "final_layernorm.bias":
        same("transformer.ln_f.bias"),
    "output_layer.weight":
        same("lm_head.weight"),
}
ONE_NORM_TENSORS = {
    **FALCON_TENSORS,
    "layers.{layer}.input_layernorm.weight":
        same("transformer.h.{layer}.input_layernorm.weight"),
    "layers.{layer}.input_layernorm.bias":
        same("transformer.h.{layer}.input_layernorm.bias"),
}
# fmt: on


class FalconDecoder:
    """Maps `new_decoder_architecture`, `multi_query` and `num_ln_in_parallel_attn`, which select one of Falcon's two
    decoder layers.

    The newer layer has GQA and one or two norms. The older one has one norm and MQA or MHA.
    """

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        heads = hf_config.get("num_attention_heads")
        if hf_config.get("new_decoder_architecture"):
            norms, groups = hf_config.get("num_ln_in_parallel_attn"), hf_config.get("num_kv_heads") or heads
        else:
            norms, groups = 1, 1 if hf_config.get("multi_query", True) else heads
        return {"parallel_attn_mlp": True, "shared_layernorm": norms == 1, "num_query_groups": groups}

    def write(self, model: ModelConfig) -> Tree:
        if model.shared_layernorm and model.query_groups == 1:
            first = {"multi_query": True, "num_kv_heads": model.num_attention_heads}
            return {"new_decoder_architecture": False, "num_ln_in_parallel_attn": None, **first}
        norms = 1 if model.shared_layernorm else 2
        groups = {"multi_query": True, "num_kv_heads": model.query_groups}
        return {"new_decoder_architecture": True, "num_ln_in_parallel_attn": norms, **groups}


class FalconFamily(Family):
    """A family in which the names of the norms depend on the number of norms per layer."""

    def table(self, model: ModelConfig) -> Mapping[str, Rule]:
        return ONE_NORM_TENSORS if model.shared_layernorm else FALCON_TENSORS


# fmt: off
FALCON = FalconFamily(
    architecture="FalconForCausalLM",
    model_type="falcon",
    tensors=FALCON_TENSORS,
    settings=(
        *SIZES,
        Field("ffn_hidden_size", "ffn_hidden_size", default=None),
        Field("max_position_embeddings", "max_position_embeddings", default=2048),
        Field("layernorm_epsilon", "layer_norm_epsilon", default=1e-5),
        activation("activation", "gelu"),
        Field("hidden_dropout", "hidden_dropout", default=0.0),
        Field("init_method_std", "initializer_range", default=0.02),
        *biases("bias", False),
        TIED,
        FalconDecoder(),
        Rope(),
        FixedSettings(add_bias_linear=False),
        RequiredKeys(alibi=False, parallel_attn=True),
    ),
    tied="lm_head.weight",
    ignored=(r"rotary_emb\.inv_freq$",),
    prefix="transformer.",
)
# fmt: on


FAMILIES = (GPT2, GPT_NEOX, FALCON, BLOOM)
