"""Rules of speculative decoding: the errors name why a model cannot verify drafts."""

from __future__ import annotations

from megalith.config.model import ModelConfig
from megalith.config.rl import RlConfig
from megalith.errors import ConfigError


def check_rollout_speculation(rl: RlConfig, model: ModelConfig) -> None:
    """Raise ConfigError if rollouts cannot use the drafts of section `rl`."""
    if rl.speculative_method == "none":
        return
    if rl.speculative_method == "draft_model" and rl.draft_model is None:
        raise ConfigError(
            "rl.speculative_method is draft_model, but rl.draft_model is not set; set it to a smaller model with the "
            "policy's tokenizer"
        )
    if rl.speculative_method == "mtp":
        check_has_mtp(model)
    check_lookup(rl.prompt_lookup_min, rl.prompt_lookup_max)
    check_rolls_back(model, "the model")


def check_lookup(shortest: int, longest: int) -> None:
    """Raise ConfigError if there is no length of n-grams."""
    if not 1 <= shortest <= longest:
        raise ConfigError(
            f"prompt_lookup_min is {shortest} and prompt_lookup_max {longest}, but the minimum must be at least 1 "
            "and at most the maximum; change one of the two"
        )


def check_has_mtp(model: ModelConfig) -> None:
    """Raise ConfigError if a model has no layers for multi-token prediction."""
    if not model.mtp_layers:
        raise ConfigError(
            "speculative_method is mtp, but model.mtp_num_layers is not set, so the model has no layers that "
            "predict further tokens; set speculative_method to ngram or draft_model"
        )


def check_rolls_back(model: ModelConfig, which: str) -> None:
    """Raise ConfigError if a model cannot drop the drafts that it does not accept."""
    if mixers := [mixer for mixer in model.recurrent_mixers if model.layers_with(mixer)]:
        raise ConfigError(
            f"speculative_method is set, but {which} has the recurrent mixer {mixers[0]}, whose "
            "state cannot be rewound to the last accepted token; set speculative_method to none"
        )
    if model.moe_expert_capacity_factor is not None:
        raise ConfigError(
            f"speculative_method is set and moe_expert_capacity_factor of {which} is "
            f"{model.moe_expert_capacity_factor}, so drafts could displace other tokens from their experts; leave "
            "one of the two settings out"
        )
