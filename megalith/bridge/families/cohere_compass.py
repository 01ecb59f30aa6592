"""Cohere Compass's language model: Cohere 2 with RoPE in halves. Each kind of layer has its own RoPE or none.

In the multimodal model, a token has three positions. For text, all three are equal, which is the same as ordinary RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.llama import IGNORED
from megalith.bridge.families.scaled import COHERE_SETTINGS, PARALLEL_TENSORS, LogitScale
from megalith.bridge.family import Family
from megalith.bridge.rope_settings import Rope, RopeByLayer
from megalith.bridge.settings import (
    LAYER_KINDS,
    FixedSettings,
    RequiredKeys,
    Tree,
    WindowsByLayer,
    WrittenKeys,
)
from megalith.config import ModelConfig

THREE_POSITIONS = ("mrope_section", "mrope_interleaved")  # parameters that text does not depend on


class RopeOrNone(RopeByLayer):
    """Maps `rope_parameters`, one entry per layer type. A layer type with a null entry has no RoPE."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        rope = hf_config.get("rope_parameters") or {}
        rope = {kind: rope[kind] for kind in LAYER_KINDS if kind in rope}
        without = [kind for kind in LAYER_KINDS if kind in rope and rope[kind] is None]
        plain = {
            kind: {key: value for key, value in (settings or {}).items() if key not in THREE_POSITIONS}
            for kind, settings in rope.items()
        }
        fields = super().read({**hf_config, "rope_parameters": plain})
        if without:
            kinds = hf_config.get("layer_types") or ["full_attention"] * hf_config["num_hidden_layers"]
            fields["no_rope_freq"] = [int(kind in without) for kind in kinds]
        return fields

    def write(self, model: ModelConfig) -> Tree:
        tree, without = super().write(model), model.layers_without_rope or [0] * model.num_layers
        skipped = {
            "full_attention" if window is None else "sliding_attention"
            for window, skips in zip(model.windows, without, strict=True)
            if skips
        }
        parameters = {
            kind: None if kind in skipped else rope for kind, rope in tree["rope_parameters"].items()
        }
        return {"rope_parameters": parameters}


class PlainLogits(LogitScale):
    """Maps `logit_scale`, with a default of 1."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        scale = hf_config.get("logit_scale")
        return super().read({"logit_scale": 1.0 if scale is None else scale})


class WindowsIfListed(WindowsByLayer):
    """Maps windows to the layers that `layer_types` calls sliding_attention.

    Without `layer_types`, no layer has a window.
    """

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        return super().read(hf_config) if hf_config.get("layer_types") else {}


# fmt: off
COHERE_COMPASS = Family(
    architecture="CohereCompassForCausalLM",
    model_type="cohere_compass_text",
    defaults={"rope_parameters": {}},
    tensors=PARALLEL_TENSORS,
    settings=(
        *[row for row in COHERE_SETTINGS if not isinstance(row, Rope | LogitScale | FixedSettings)
          and getattr(row, "setting", None) != "kv_channels"],
        PlainLogits(),
        RopeOrNone(base=10_000.0, nested=True),
        WindowsIfListed(pattern=None, unused=4096),
        FixedSettings(normalization="LayerNorm", add_norm_bias=False, swiglu=True, add_bias_linear=False,
                      hidden_dropout=0.0, parallel_attn_mlp=True, shared_layernorm=True),
        RequiredKeys(hidden_act="silu", pooling=None),
        WrittenKeys(pad_token_id=None),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on


FAMILIES = (COHERE_COMPASS,)
