"""GPT-2's relatives with untransposed matrices: GPT-Neo and GPT-BigCode.

GPT-Neo: windows in every second layer, no QKV biases, attention scores without a scale. GPT-BigCode (StarCoder,
SantaCoder): multi-query attention; its QKV matrix has Megalith's order of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.layernorm_decoders import GPT2_ALIASES, GPT2_SETTINGS, GPT2_TENSORS, activation
from megalith.bridge.families.llama import TIED
from megalith.bridge.family import Family
from megalith.bridge.rows import Rule, qkv, same
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Tree
from megalith.config import ModelConfig
from megalith.errors import ConfigError

# fmt: off
PLAIN: dict[str, Rule] = {name: same(rule.names[0]) for name, rule in GPT2_TENSORS.items()}
IN_ATTENTION = "transformer.h.{layer}.attn.attention."
NEO_TENSORS = {
    **PLAIN,
    "layers.{layer}.self_attention.linear_qkv.weight":
        qkv(*(f"{IN_ATTENTION}{part}_proj.weight" for part in "qkv")),
    "layers.{layer}.self_attention.linear_proj.weight":
        same(f"{IN_ATTENTION}out_proj.weight"),
    "layers.{layer}.self_attention.linear_proj.bias":
        same(f"{IN_ATTENTION}out_proj.bias"),
}
# fmt: on


class LocalLayers:
    """Maps `attention_types`, pairs of a list of layer kinds (global, local) and a repeat count, and `window_size` to
    windows.
    """

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        pairs = hf_config.get("attention_types") or [[["global", "local"], 12]]
        layers = hf_config["num_layers"]
        try:
            total = sum(len(pattern) * max(count, 0) for pattern, count in pairs)
            kinds = (
                [kind for pattern, count in pairs for kind in list(pattern) * count]
                if total == layers
                else []
            )
        except (TypeError, ValueError):
            raise ConfigError(
                f"config.json has attention_types {pairs!r}, which is not a list of [list of layers, count]"
            ) from None
        listed = hf_config.get("attention_layers")
        if (
            len(kinds) != layers
            or any(kind not in ("global", "local") for kind in kinds)
            or (listed is not None and listed != kinds)
        ):
            raise ConfigError(
                f"config.json has attention_types {pairs!r} for {layers} layers, and attention_layers {listed!r}; "
                "both must give global or local for each layer, and be equal"
            )
        if "local" not in kinds:
            return {}
        window = hf_config.get("window_size", 256)
        if type(window) is not int or not 0 < window < 2**31:
            raise ConfigError(
                f"config.json has window_size {window!r}, but local layers need a window of 1 to 2,147,483,647 "
                "tokens; correct window_size"
            )
        return {
            "window_size": [window - 1, 0],
            "window_attn_skip_freq": [int(kind == "local") for kind in kinds],
        }

    def write(self, model: ModelConfig) -> Tree:
        kinds = ["global" if window is None else "local" for window in model.windows]
        window = max(filter(None, model.windows), default=256)
        return {"attention_types": [[kinds, 1]], "attention_layers": kinds, "window_size": window}


# fmt: off
GPT_NEO = Family(
    architecture="GPTNeoForCausalLM",
    model_type="gpt_neo",
    aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    tensors=NEO_TENSORS,
    settings=(
        Field("num_layers", "num_layers"),
        Field("hidden_size", "hidden_size"),
        Field("ffn_hidden_size", "intermediate_size", default=None),
        Field("num_attention_heads", "num_heads"),
        Field("vocab_size", "vocab_size"),
        Field("max_position_embeddings", "max_position_embeddings"),
        Field("layernorm_epsilon", "layer_norm_epsilon", default=1e-5),
        activation("activation_function", "gelu_new"),
        Field("hidden_dropout", "resid_dropout", default=0.0),
        Field("hidden_dropout", "embed_dropout", default=0.0),
        Field("attention_dropout", "attention_dropout", default=0.0),
        Field("init_method_std", "initializer_range", default=0.02),
        TIED,
        LocalLayers(),
        FixedSettings(position_embedding_type="learned_absolute", softmax_scale=1.0, add_bias_linear=False,
                      add_proj_bias=True, add_mlp_bias=True),
    ),
    tied="lm_head.weight",
    ignored=(r"\.attn\.attention\.(masked_)?bias$",),
    prefix="transformer.",
)
# fmt: on


class MultiQuery:
    """Maps `multi_query` to one key and value head if it is true, otherwise to one per query head."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        heads = hf_config["n_head"]
        groups = 1 if hf_config.get("multi_query", True) else heads
        if hf_config.get("num_key_value_heads") not in (None, groups):
            raise ConfigError(
                f"config.json has num_key_value_heads {hf_config['num_key_value_heads']}, but multi_query "
                f"{hf_config.get('multi_query', True)} means {groups}; remove num_key_value_heads"
            )
        return {"num_query_groups": groups}

    def write(self, model: ModelConfig) -> Tree:
        return {"multi_query": model.query_groups == 1, "num_key_value_heads": model.query_groups}


GPT_BIGCODE = Family(
    architecture="GPTBigCodeForCausalLM",
    model_type="gpt_bigcode",
    aliases=GPT2_ALIASES,
    tensors=PLAIN,
    settings=(
        *[row for row in GPT2_SETTINGS if row.setting != "activation"],
        activation("activation_function", "gelu_pytorch_tanh", tanh="gelu_pytorch_tanh"),
        TIED,
        MultiQuery(),
        FixedSettings(position_embedding_type="learned_absolute"),
        RequiredKeys(scale_attn_weights=True, add_cross_attention=False),
    ),
    tied="lm_head.weight",
    ignored=(r"\.attn\.(masked_)?bias$",),
    prefix="transformer.",
)


FAMILIES = (GPT_NEO, GPT_BIGCODE)
