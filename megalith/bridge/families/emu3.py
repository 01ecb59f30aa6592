"""Emu3: Llama with dropout before each residual addition, at the attention dropout rate."""

from __future__ import annotations

from megalith.bridge.families.llama import ATTENTION_BIAS, IGNORED, SIZES, TENSORS, UNTIED
from megalith.bridge.family import Family
from megalith.bridge.rope_settings import Rope
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, WrittenKeys

EMU3 = Family(
    architecture="Emu3ForCausalLM",
    model_type="emu3_text_model",
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "attention_dropout": 0.1,
        "max_position_embeddings": 9216,
        "rope_theta": 1e6,
    },
    tensors=TENSORS,
    settings=(
        *SIZES,
        UNTIED,
        Rope(),
        *ATTENTION_BIAS,
        Field("add_mlp_bias", "mlp_bias", default=False),
        Field("hidden_dropout", "attention_dropout", default=0.1),
        FixedSettings(normalization="RMSNorm", swiglu=True, add_bias_linear=False),
        RequiredKeys(hidden_act="silu"),
        WrittenKeys(pad_token_id=None),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

FAMILIES = (EMU3,)
