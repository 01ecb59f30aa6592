"""Mamba-2: models in which every layer is a Mamba-2 mixer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.llama import IGNORED, UNTIED
from megalith.bridge.families.nemotron_h import NEMOTRON_H
from megalith.bridge.family import Family
from megalith.bridge.mamba_rows import ExpandedHeads, StepLimit
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Tree, WrittenKeys
from megalith.config import ModelConfig


class OnlyMamba:
    """Sets every layer to Mamba-2."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        return {"hybrid_layer_pattern": "M" * hf_config["num_hidden_layers"]}

    def write(self, model: ModelConfig) -> Tree:
        return {}


MAMBA2 = Family(
    architecture="Mamba2ForCausalLM",
    model_type="mamba2",
    tensors={
        name: rule for name, rule in NEMOTRON_H.tensors.items() if ".mlp" not in name and "_qkv" not in name
    },
    settings=(
        Field("num_layers", "num_hidden_layers"),
        OnlyMamba(),
        Field(
            "max_position_embeddings", "max_position_embeddings", default=2**20
        ),  # transformers has no limit
        Field("hidden_size", "hidden_size"),
        Field("vocab_size", "vocab_size"),
        Field("layernorm_epsilon", "layer_norm_epsilon", default=1e-5),
        Field("init_method_std", "initializer_range", default=0.1),
        UNTIED,
        ExpandedHeads("num_heads", "head_dim"),
        Field("mamba_num_heads", "num_heads", default=128),
        Field("mamba_head_dim", "head_dim", default=64),
        Field("mamba_state_dim", "state_size", default=128),
        Field("mamba_num_groups", "n_groups", default=8),
        Field("linear_conv_kernel_dim", "conv_kernel", default=4),
        Field("mamba_conv_bias", "use_conv_bias", default=True),
        Field("mamba_proj_bias", "use_bias", default=False),
        Field("mamba_out_bias", "use_bias", default=False),
        StepLimit(),
        FixedSettings(
            normalization="RMSNorm",
            add_bias_linear=False,
            hidden_dropout=0.0,
            position_embedding_type="none",
            num_attention_heads=1,
        ),
        RequiredKeys(hidden_act="silu"),
        WrittenKeys(bos_token_id=None, eos_token_id=None, pad_token_id=None),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
    prefix="backbone.",
)

FAMILIES = (MAMBA2,)
