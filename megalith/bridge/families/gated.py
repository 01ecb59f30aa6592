"""Gated decoders with small differences to Llama: Ministral, CWM, Helium, Ernie 4.5, VaultGemma and HyperCLOVA X.

Ministral and CWM: windows by layer. Helium and Ernie 4.5: interleaved RoPE. VaultGemma: Gemma 2 without norms after
attention and MLP. HyperCLOVA X: Granite with norms after attention and MLP, and a factor on the logits instead of a
divisor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.gpt_oss import RopeWithDefaults
from megalith.bridge.families.layernorm_decoders import biases
from megalith.bridge.families.llama import GEMMA2, IGNORED, SETTINGS, TENSORS
from megalith.bridge.families.scaled import FACTORS, GRANITE
from megalith.bridge.family import Family
from megalith.bridge.rope_settings import Rope
from megalith.bridge.rows import same
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Tree, WindowsByLayer, WrittenKeys
from megalith.config import ModelConfig
from megalith.errors import ConfigError

MINISTRAL = Family(
    architecture="MinistralForCausalLM",
    model_type="ministral",
    defaults={"num_key_value_heads": 8},
    tensors=TENSORS,
    settings=(*SETTINGS, WindowsByLayer(pattern=None, unused=4096)),
    tied="lm_head.weight",
    ignored=IGNORED,
)

LLAMA3 = {
    "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
CWM = Family(
    architecture="CwmForCausalLM",
    model_type="cwm",
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    tensors=TENSORS,
    settings=(
        *[row for row in SETTINGS if not isinstance(row, Rope)],
        RopeWithDefaults(LLAMA3, 1e6),
        WindowsByLayer(every=4, default=8192, pattern=None, unused=8192, first=True),
        Field("add_mlp_bias", "mlp_bias", default=False),
        WrittenKeys(bos_token_id=128000),  # transformers rejects null
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)


class HeadsFillHidden:
    """Check that the heads' outputs have the width of the residual stream, as Helium's output projection needs."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        return {}

    def write(self, model: ModelConfig) -> Tree:
        width = model.num_attention_heads * model.head_dim
        if width != model.hidden_size:
            raise ConfigError(
                f"its num_attention_heads × head_dim is {width}, but this family requires hidden_size, "
                f"{model.hidden_size}"
            )
        return {}


HELIUM = Family(
    architecture="HeliumForCausalLM",
    model_type="helium",
    defaults={"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 100000.0},
    tensors=TENSORS,
    settings=(
        *SETTINGS,
        Field("add_qkv_bias", "attention_bias", default=False),
        Field("add_mlp_bias", "mlp_bias", default=False),
        HeadsFillHidden(),
        FixedSettings(rotary_interleaved=True),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

ERNIE4_5 = Family(
    architecture="Ernie4_5ForCausalLM",
    model_type="ernie4_5",
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    tensors=TENSORS,
    settings=(
        *[row for row in SETTINGS if getattr(row, "setting", None) != "attention_dropout"],
        *biases("use_bias", False),
        FixedSettings(rotary_interleaved=True, attention_dropout=0.0),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

VAULT_GEMMA = Family(
    architecture="VaultGemmaForCausalLM",
    model_type="vaultgemma",
    defaults=GEMMA2.defaults,
    tensors=GEMMA2.tensors,
    settings=(
        *[row for row in GEMMA2.settings if not isinstance(row, RequiredKeys | FixedSettings | WindowsByLayer)],
        FixedSettings(
            normalization="RMSNorm", layernorm_zero_centered_gamma=True, gated_linear_unit=True,
            scale_embeddings=True, add_bias_linear=False, hidden_dropout=0.0,
        ),
        WindowsByLayer(every=2, pattern=None, unused=4096),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)  # fmt: skip


class LogitFactor:
    """Maps a factor of the logits, stored as `logits_scaling` or as another `key`."""

    def __init__(self, key: str = "logits_scaling"):
        self._key = key

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        factor = hf_config.get(self._key)
        return {"logits_scaling": 1 / (1.0 if factor is None else factor)}

    def write(self, model: ModelConfig) -> Tree:
        return {self._key: 1 / model.logits_scaling}


class AttentionMultiplier:
    """Maps `attention_multiplier` to the softmax scale. The default is 1 / √head_dim."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        value, heads = hf_config.get("attention_multiplier"), hf_config["num_attention_heads"] or 1
        size = hf_config.get("head_dim") or hf_config["hidden_size"] // heads
        return {} if value is None or value == size**-0.5 else {"softmax_scale": value}

    def write(self, model: ModelConfig) -> Tree:
        return {"attention_multiplier": model.softmax_scale}


class PostNorm:
    """Maps `use_post_norm`, which adds norms after attention and MLP to the norms before them."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        return {"norm_placement": "sandwich" if hf_config.get("use_post_norm", True) else "pre"}

    def write(self, model: ModelConfig) -> Tree:
        return {"use_post_norm": model.norm_placement == "sandwich"}


# fmt: off
HYPERCLOVA_X = Family(
    architecture="HyperCLOVAXForCausalLM",
    model_type="hyperclovax",
    tensors={
        **TENSORS,
        "layers.{layer}.post_attention_layernorm.weight":
            same("model.layers.{layer}.post_norm1.weight"),
        "layers.{layer}.post_mlp_layernorm.weight":
            same("model.layers.{layer}.post_norm2.weight"),
    },
    settings=(
        *[row for row in GRANITE.settings if row not in FACTORS],
        *[row for row in FACTORS if row.setting not in ("softmax_scale", "logits_scaling")],
        AttentionMultiplier(),
        LogitFactor(),
        PostNorm(),
        WrittenKeys(pad_token_id=None),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on


FAMILIES = (MINISTRAL, CWM, HELIUM, ERNIE4_5, VAULT_GEMMA, HYPERCLOVA_X)
