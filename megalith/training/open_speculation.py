"""Loads the draft model for speculative decoding."""

from __future__ import annotations

from megalith.data.tokenizers.open_tokenizer import Tokenizer
from megalith.errors import ConfigError
from megalith.generation.speculation import Speculation
from megalith.training.loading import load_with_tokenizer


def open_speculation(
    method: str,
    num_speculative_tokens: int,
    prompt_lookup_max: int,
    prompt_lookup_min: int,
    draft_model: str | None,
    tokenizer: Tokenizer | None,
) -> Speculation | None:
    """Return the settings of an engine's speculative decoding, with the draft model loaded. None if `method` is none.

    Args:
        method: a method of Speculation, or "none".
        num_speculative_tokens: drafts per step.
        prompt_lookup_max: see Speculation.
        prompt_lookup_min: see Speculation.
        draft_model: folder of the draft model. It is loaded into the host's memory.
        tokenizer: tokenizer of the model that verifies the drafts.

    Raises:
        ConfigError: the method draft_model has no draft model, another method has one, or the draft model's tokenizer
            differs.
    """
    if (method == "draft_model") != (draft_model is not None):
        has = "draft_model is not set" if draft_model is None else f"draft_model is {draft_model}"
        raise ConfigError(
            f"speculative_method is {method} and {has}; set draft_model if, and only if, speculative_method is "
            "draft_model"
        )
    if method == "none":
        return None
    model = None
    if draft_model is not None:
        model, other = load_with_tokenizer(draft_model, "cpu")
        if tokenizer is not None and other is not None and tokenizer.fingerprint != other.fingerprint:
            raise ConfigError(
                f"draft_model {draft_model} has a different tokenizer than the model, so its ids "
                "mean other tokens; use a model with the same tokenizer"
            )
    return Speculation(method, num_speculative_tokens, prompt_lookup_max, prompt_lookup_min, model)
