"""Reward models: the `…ForSequenceClassification` classes of decoders, with one label.

Tensors and settings are the same as the decoder's, with `score.weight` in place of the output matrix.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalith.bridge.family import Family
from megalith.bridge.rows import same
from megalith.bridge.settings import Tree
from megalith.config import ModelConfig
from megalith.errors import ConfigError

CLASSES = {  # architecture of the decoder → that with a score; the name of its module in this folder
    "GPT2LMHeadModel": ("GPT2ForSequenceClassification", "layernorm_decoders"),
    "LlamaForCausalLM": ("LlamaForSequenceClassification", "llama"),
    "MistralForCausalLM": ("MistralForSequenceClassification", "llama"),
    "Qwen2ForCausalLM": ("Qwen2ForSequenceClassification", "llama"),
    "Qwen3ForCausalLM": ("Qwen3ForSequenceClassification", "llama"),
    "GemmaForCausalLM": ("GemmaForSequenceClassification", "llama"),
    "Gemma2ForCausalLM": ("Gemma2ForSequenceClassification", "llama"),
    "Gemma3ForCausalLM": ("Gemma3TextForSequenceClassification", "llama"),
    "Olmo2ForCausalLM": ("Olmo2ForSequenceClassification", "llama"),
    "Phi3ForCausalLM": ("Phi3ForSequenceClassification", "llama"),
    "SmolLM3ForCausalLM": ("SmolLM3ForSequenceClassification", "llama"),
    "MixtralForCausalLM": ("MixtralForSequenceClassification", "experts"),
    "Qwen2MoeForCausalLM": ("Qwen2MoeForSequenceClassification", "experts"),
    "Qwen3MoeForCausalLM": ("Qwen3MoeForSequenceClassification", "experts"),
    "GPTNeoXForCausalLM": ("GPTNeoXForSequenceClassification", "layernorm_decoders"),
    "Starcoder2ForCausalLM": ("Starcoder2ForSequenceClassification", "separate_qkv"),
    "StableLmForCausalLM": ("StableLmForSequenceClassification", "separate_qkv"),
    "GptOssForCausalLM": ("GptOssForSequenceClassification", "gpt_oss"),
    "SeedOssForCausalLM": ("SeedOssForSequenceClassification", "seed_oss"),
}


class OneLabel:
    """Maps `num_labels` and `id2label` to a score head. The number of labels must be 1."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        labels = hf_config.get("id2label")
        count = len(labels) if isinstance(labels, Mapping) else hf_config.get("num_labels", 2)
        if count != 1:
            raise ConfigError(
                f"config.json has {count} labels, but a reward model has 1; classifiers are not supported"
            )
        return {"score_head": True}

    def write(self, model: ModelConfig) -> Tree:
        return {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}} if model.score_head else {}


def _families() -> tuple[Family, ...]:
    families = []
    for decoder, (architecture, module) in CLASSES.items():
        listed = importlib.import_module(f"megalith.bridge.families.{module}").FAMILIES
        family = next(each for each in listed if each.architecture == decoder)
        outputs = {
            name: rule for name, rule in family.tensors.items() if not name.startswith("output_layer.")
        }
        families.append(
            replace(
                family,
                architecture=architecture,
                tensors={**outputs, "score.weight": same("score.weight")},
                settings=(*family.settings, OneLabel()),
                trusts_stored_head=False,
            )
        )
    return tuple(families)


FAMILIES = _families()


def with_score(family: Family) -> Family:
    """Return the reward-model family of a decoder family, or the family itself if it is a reward-model family or has
    none."""
    name, _ = CLASSES.get(family.architecture, (None, None))
    return next((each for each in FAMILIES if each.architecture == name), family)
