"""Seed-OSS: Llama with biases on queries, keys and values, and dropout before each residual addition."""

from __future__ import annotations

from megalith.bridge.families.llama import IGNORED, SIZES, TENSORS, UNTIED
from megalith.bridge.family import Family
from megalith.bridge.rope_settings import Rope
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, WrittenKeys

SEED_OSS = Family(
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_dropout": 0.1},
    tensors=TENSORS,
    settings=(
        *SIZES,
        UNTIED,
        Rope(),
        Field("add_qkv_bias", "attention_bias", default=True),
        Field("add_proj_bias", "attention_out_bias", default=False),
        Field("add_mlp_bias", "mlp_bias", default=False),
        Field("hidden_dropout", "residual_dropout", default=0.1),
        FixedSettings(normalization="RMSNorm", swiglu=True, add_bias_linear=False),
        RequiredKeys(hidden_act="silu"),
        WrittenKeys(pad_token_id=None),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

FAMILIES = (SEED_OSS,)
