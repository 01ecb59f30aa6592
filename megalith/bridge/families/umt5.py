"""UMT5: T5 1.1 with relative positions in every layer."""

from __future__ import annotations

from dataclasses import replace

from megalith.bridge.families.encoders import MT5, T5, T5_SETTINGS
from megalith.bridge.rows import same
from megalith.bridge.settings import FixedSettings

# fmt: off
POSITIONS = {
    "encoder.layers.{layer}.self_attention.relative_attention_bias.weight":
        same("encoder.block.{layer}.layer.0.SelfAttention.relative_attention_bias.weight"),
    "layers.{layer}.self_attention.relative_attention_bias.weight":
        same("decoder.block.{decoder}.layer.0.SelfAttention.relative_attention_bias.weight"),
}
# fmt: on

UMT5 = replace(
    T5,
    architecture="UMT5ForConditionalGeneration",
    model_type="umt5",
    defaults=MT5.defaults,
    tensors=T5.tensors | POSITIONS,
    settings=(*T5_SETTINGS, FixedSettings(relative_attention_per_layer=True)),
)

FAMILIES = (UMT5,)
