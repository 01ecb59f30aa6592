"""The language model inside a multimodal model of transformers: its configuration and its tensors.

A wrapper's config.json contains the language model's under `text_config`. Its files also contain the tensors of a
vision tower and a projector, which are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from megalith.errors import ConfigError

# For each wrapper the model_type of its language model where text_config leaves it out.
WRAPPERS = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "LlavaForConditionalGeneration": "llama",
    "Mistral3ForConditionalGeneration": "mistral",
}
TOP_KEYS = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")  # what the wrapper decides
LEFT_OUT = ("vision_tower.", "multi_modal_projector.")
T = TypeVar("T")


def wrapper_of(config: Mapping[str, Any]) -> str | None:
    """Return the class of a multimodal model that can be read; None for another."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) and name in WRAPPERS else None


def language_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the language model; that of any other model as it is. Raises ConfigError."""
    wrapper = wrapper_of(config)
    if wrapper is None:
        return config
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError(
            f"config.json of {wrapper} has no text_config, which is its language model; fetch it again"
        )
    top = {key: config[key] for key in TOP_KEYS if config.get(key) is not None}
    without = {key: value for key, value in text.items() if key != "architectures"}
    return {"model_type": WRAPPERS[wrapper], **without, **top}


def language_tensors(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the tensors of the language model under the names that they have in a model of their own."""
    named = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix("model.")
        if plain.startswith("language_model."):
            inner = plain.removeprefix("language_model.")
            named[inner if inner.startswith(("model.", "lm_head.")) else f"model.{inner}"] = tensor
        elif not plain.startswith(LEFT_OUT):
            named[name] = tensor
    return named
