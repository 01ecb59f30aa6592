"""Mistral: Llama, in some releases with a sliding window."""

from __future__ import annotations

from megalith.bridge.families.llama import IGNORED, SETTINGS, TENSORS
from megalith.bridge.family import Family
from megalith.bridge.settings import Window

MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    absent={"num_key_value_heads": 8},
    tensors=TENSORS,
    settings=(*SETTINGS, Window(default=4096)),
    tied="lm_head.weight",
    ignored=IGNORED,
)
