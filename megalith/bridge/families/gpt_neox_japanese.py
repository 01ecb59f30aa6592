"""GPT-NeoX-Japanese of ABEJA: GPT-NeoX with sequential attention and MLP, and a bias in the last layer's attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.layernorm_decoders import NEOX_TENSORS, activation
from megalith.bridge.families.llama import TIED
from megalith.bridge.family import Family
from megalith.bridge.rope_settings import PartialRope
from megalith.bridge.rows import same
from megalith.bridge.settings import Field, FixedSettings, Tree
from megalith.config import ModelConfig
from megalith.errors import ConfigError


class Multiple:
    """Maps `intermediate_multiple_size`, the MLP's width divided by the hidden size, to the width."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        multiple = hf_config.get("intermediate_multiple_size", 4)
        if not multiple:
            raise ConfigError(f"config.json has intermediate_multiple_size {multiple}; it must be 1 or more")
        return {"ffn_hidden_size": multiple * hf_config["hidden_size"]}

    def write(self, model: ModelConfig) -> Tree:
        if model.ffn_size % model.hidden_size:
            raise ConfigError(
                f"ffn_hidden_size {model.ffn_size} is not a multiple of hidden_size {model.hidden_size}"
            )
        return {"intermediate_multiple_size": model.ffn_size // model.hidden_size}


# fmt: off
ATTENTION = "gpt_neox_japanese.layers.{layer}.attention."
GPT_NEOX_JAPANESE = Family(
    architecture="GPTNeoXJapaneseForCausalLM",
    model_type="gpt_neox_japanese",
    tensors={
        **{name: same(rule.names[0].replace("gpt_neox.", "gpt_neox_japanese."))
           for name, rule in NEOX_TENSORS.items()},
        "layers.{layer}.self_attention.linear_proj.bias":
            same(f"{ATTENTION}dense_bias"),
    },
    settings=(
        Field("num_layers", "num_hidden_layers"),
        Field("hidden_size", "hidden_size"),
        Field("num_attention_heads", "num_attention_heads"),
        Field("vocab_size", "vocab_size"),
        Field("max_position_embeddings", "max_position_embeddings"),
        Field("layernorm_epsilon", "layer_norm_eps", default=1e-5),
        Field("init_method_std", "initializer_range", default=0.02),
        Field("attention_dropout", "attention_dropout", default=0.1),
        Field("hidden_dropout", "hidden_dropout", default=0.0),
        Multiple(),
        activation("hidden_act", "gelu"),
        TIED,
        PartialRope(1.0, share="rotary_pct", base="rotary_emb_base"),
        FixedSettings(normalization="LayerNorm", add_bias_linear=False, add_proj_bias=True,
                      proj_bias_in_last_layer_only=True),
    ),
    tied="embed_out.weight",
    prefix="gpt_neox_japanese.",
)
# fmt: on

FAMILIES = (GPT_NEOX_JAPANESE,)
