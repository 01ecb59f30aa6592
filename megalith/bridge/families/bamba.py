"""Bamba: Mamba-2 in most layers, attention with RoPE on half of each head in the others, and an MLP in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.llama import ATTENTION_BIAS, IGNORED, SETTINGS, TENSORS
from megalith.bridge.family import Family
from megalith.bridge.mamba_rows import (
    MambaHeads,
    StepLimit,
    mamba_tensors,
)
from megalith.bridge.rope_settings import PartialRope, Rope
from megalith.bridge.rows import gate_up, same
from megalith.bridge.settings import Field, Tree, WrittenKeys
from megalith.config import ModelConfig

SIZES_OF_MAMBA = (
    Field("mamba_state_dim", "mamba_d_state", default=256),
    Field("mamba_num_groups", "mamba_n_groups", default=1),
    Field("linear_conv_kernel_dim", "mamba_d_conv", default=4),
    Field("mamba_conv_bias", "mamba_conv_bias", default=True),
    Field("mamba_proj_bias", "mamba_proj_bias", default=False),
    StepLimit(),
)


class AttentionIndices:
    """Maps `attn_layer_indices`, the indices of the attention layers, to the layer kinds.

    All other layers are Mamba-2.
    """

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        attention = hf_config.get("attn_layer_indices") or []
        layers = range(hf_config["num_hidden_layers"])
        return {
            "experimental_attention_variant": "mamba2",
            "linear_attention_freq": [int(layer not in attention) for layer in layers],
        }

    def write(self, model: ModelConfig) -> Tree:
        return {"attn_layer_indices": [n for n in range(model.num_layers) if model.has_attention(n)]}


class OnlyHalfRope(PartialRope):
    """Maps the RoPE settings and requires RoPE on half of each head: transformers ignores any other fraction."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        return {**super().read(hf_config), "rotary_percent": 0.5}


# fmt: off
FEED_FORWARD = {
    "layers.{layer}.pre_mlp_layernorm.weight":
        same("model.layers.{layer}.pre_ff_layernorm.weight"),
    "layers.{layer}.mlp.linear_fc1.weight":
        gate_up("model.layers.{layer}.feed_forward.gate_proj.weight",
                "model.layers.{layer}.feed_forward.up_proj.weight"),
    "layers.{layer}.mlp.linear_fc1.bias":
        gate_up("model.layers.{layer}.feed_forward.gate_proj.bias",
                "model.layers.{layer}.feed_forward.up_proj.bias"),
    "layers.{layer}.mlp.linear_fc2.weight":
        same("model.layers.{layer}.feed_forward.down_proj.weight"),
    "layers.{layer}.mlp.linear_fc2.bias":
        same("model.layers.{layer}.feed_forward.down_proj.bias"),
    "final_layernorm.weight":
        same("model.final_layernorm.weight"),
}
BAMBA = Family(
    architecture="BambaForCausalLM",
    model_type="bamba",
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    tensors={
        **TENSORS,
        **FEED_FORWARD,
        **mamba_tensors("model.layers.{layer}.mamba."),
    },
    settings=(
        *[row for row in SETTINGS if not isinstance(row, Rope)],
        OnlyHalfRope(default=0.5),
        *ATTENTION_BIAS,
        Field("add_mlp_bias", "mlp_bias", default=False),
        AttentionIndices(),
        MambaHeads(),
        *SIZES_OF_MAMBA,
        Field("mamba_out_bias", "mamba_proj_bias", default=False),
        WrittenKeys(pad_token_id=None),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on


# fmt: on


# fmt: on


# fmt: on

FAMILIES = (BAMBA,)
