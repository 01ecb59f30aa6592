"""Falcon-H1: attention and Mamba-2 in parallel in every layer, and factors on inputs, outputs and gates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.bamba import FEED_FORWARD, SIZES_OF_MAMBA
from megalith.bridge.families.gated import LogitFactor
from megalith.bridge.families.llama import ATTENTION_BIAS, IGNORED, SETTINGS, TENSORS
from megalith.bridge.family import Family
from megalith.bridge.mamba_rows import MambaHeads, mamba_tensors
from megalith.bridge.settings import Field, Tree, WrittenKeys
from megalith.config import ModelConfig


class ParallelMixers:
    """Maps `ssm_multipliers` and `mlp_multipliers`, and sets attention and Mamba-2 in parallel in every layer."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        fields: Tree = {
            "experimental_attention_variant": "mamba2",
            "linear_attention_freq": [1] * hf_config["num_hidden_layers"],
            "parallel_mixers": True,
        }
        for key in ("ssm_multipliers", "mlp_multipliers"):
            if any(factor != 1 for factor in hf_config.get(key) or ()):
                fields[key] = hf_config[key]
        return fields

    def write(self, model: ModelConfig) -> Tree:
        return {
            "ssm_multipliers": model.ssm_multipliers or [1.0] * 5,
            "mlp_multipliers": model.mlp_multipliers or [1.0] * 2,
        }


FALCON_FACTORS = (
    "embedding_multiplier",
    "key_multiplier",
    "attention_in_multiplier",
    "attention_out_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
)
# fmt: off
FALCON_H1 = Family(
    architecture="FalconH1ForCausalLM",
    model_type="falcon_h1",
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    tensors={
        **TENSORS,
        **FEED_FORWARD,
        **mamba_tensors("model.layers.{layer}.mamba.", "layers.{layer}.mamba."),
    },
    settings=(
        *SETTINGS,
        *ATTENTION_BIAS,
        Field("add_mlp_bias", "mlp_bias", default=False),
        ParallelMixers(),
        MambaHeads(width_key="mamba_d_ssm", width=1024),
        *SIZES_OF_MAMBA,
        Field("mamba_out_bias", "projectors_bias", default=False),
        Field("mamba_rms_norm", "mamba_rms_norm", default=False),
        Field("mamba_norm_before_gate", "mamba_norm_before_gate", default=True),
        LogitFactor("lm_head_multiplier"),
        *[Field(key, key, default=1.0) for key in FALCON_FACTORS],
        WrittenKeys(pad_token_id=None),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

FAMILIES = (FALCON_H1,)
