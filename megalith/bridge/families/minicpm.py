"""MiniCPM3: latent attention with RoPE in halves, and factors on the embedding, the layers' outputs and the logits.

The factor on residual branches is `scale_depth` / √layers; the logits are divided by hidden_size / `dim_model_base`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.experts import LATENT, LatentHeads, RotaryHeads
from megalith.bridge.families.llama import IGNORED, SIZES, TENSORS, TIED
from megalith.bridge.family import Family
from megalith.bridge.rope_settings import Rope
from megalith.bridge.rows import same
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Tree
from megalith.config import ModelConfig
from megalith.errors import ConfigError


class DepthScale:
    """Maps `scale_depth`, divided by the square root of the number of layers, to the residual factor; null means no
    factor.
    """

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        scale, root = hf_config.get("scale_depth", 1.4), math.sqrt(hf_config["num_hidden_layers"] or 1)
        return {"residual_multiplier": 1.0 if scale is None else scale / root}

    def write(self, model: ModelConfig) -> Tree:
        root = math.sqrt(model.num_layers)
        scale = model.residual_multiplier * root
        candidates = (round(scale, 12), scale, math.nextafter(scale, 0.0), math.nextafter(scale, math.inf))
        exact = [each for each in candidates if each / root == model.residual_multiplier]
        return {"scale_depth": exact[0] if exact else scale}


class LogitBase:
    """Maps `dim_model_base`: logits are divided by hidden_size / dim_model_base; null means no divisor."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        base = hf_config.get("dim_model_base", 256)
        if base == 0:
            raise ConfigError(
                "config.json has dim_model_base 0, but hidden_size is divided by it; correct dim_model_base"
            )
        return {"logits_scaling": 1.0 if base is None else hf_config["hidden_size"] / base}

    def write(self, model: ModelConfig) -> Tree:
        return {"dim_model_base": round(model.hidden_size / model.logits_scaling)}


class ValueHeads:
    """Maps `v_head_dim`. The default is hidden_size / heads."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        size = hf_config.get("v_head_dim")
        if size is None:
            size = hf_config["hidden_size"] // (hf_config["num_attention_heads"] or 1)
        return {"v_head_dim": size}

    def write(self, model: ModelConfig) -> Tree:
        return {"v_head_dim": model.v_head_dim}


# fmt: off
MINICPM3 = Family(
    architecture="MiniCPM3ForCausalLM",
    model_type="minicpm3",
    defaults={"rms_norm_eps": 1e-5, "initializer_range": 0.1},
    tensors=TENSORS | {name: same(rule.names[0]) for name, rule in LATENT.items()},
    settings=(
        *[size for size in SIZES if size.setting not in ("num_query_groups", "kv_channels")],
        LatentHeads(),
        RotaryHeads(32),
        TIED,
        Rope(),
        Field("q_lora_rank", "q_lora_rank", default=768),
        Field("kv_lora_rank", "kv_lora_rank", default=256),
        Field("qk_head_dim", "qk_nope_head_dim", default=64),
        Field("qk_pos_emb_head_dim", "qk_rope_head_dim", default=32),
        ValueHeads(),
        Field("embedding_multiplier", "scale_emb", default=12),
        DepthScale(),
        LogitBase(),
        Field("add_mlp_bias", "mlp_bias", default=False),
        FixedSettings(normalization="RMSNorm", swiglu=True, add_bias_linear=False, hidden_dropout=0.0,
                      multi_latent_attention=True),
        RequiredKeys(hidden_act="silu", attention_bias=False),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on


FAMILIES = (MINICPM3,)
