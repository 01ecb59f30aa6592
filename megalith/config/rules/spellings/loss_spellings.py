"""verl's and NeMo-RL's spellings of the loss and its aggregation."""

from __future__ import annotations

from typing import Any

from megalith.config.rules.spellings.spelling import PER_SEQUENCE, RATIO_CLIP, Rl, is_cispo, is_per_sequence
from megalith.errors import ConfigError

DUAL_CLIP = 3.0  # verl's clip_ratio_c
LOSS_MODES = {  # verl's name → rl.loss_type
    "vanilla": "dapo",
    "gspo": "grpo",
    "cispo": "cispo",
    "sapo": "sapo",
    "gpg": "gpg",
    "geo_mean": "gmpo",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
}
TOKEN_MEANS, SEQUENCE_MEANS = (
    ("cispo", "gpg", "kl_cov", "clip_cov", "reinforce"),
    ("sapo",),
)  # values of rl.loss_type
AGGREGATIONS = {
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
    "token-sum": "token_sum",
}
NO_EFFECT = {  # keys of verl's policy_loss that other losses read, with its defaults
    "_target_": "verl.workers.config.PolicyLossConfig",
    "dro_beta": None,
}
COVARIANCE = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
WITHOUT_CLIP = (
    "cispo",
    "sapo",
    "vespo",
    "gpg",
    "gmpo",
    "kl_cov",
    "clip_cov",
    "reinforce",
)  # values of rl.loss_type


def policy_loss(value: Any, rl: Rl) -> dict[str, Any]:
    mode, settings = value, {}
    if isinstance(value, dict):
        settings = {key: value[key] for key in COVARIANCE if value.get(key) is not None}
        for key, other in value.items():
            if key not in ("loss_mode", *COVARIANCE) and (key not in NO_EFFECT or other != NO_EFFECT[key]):
                raise ConfigError(
                    f"rl.policy_loss.{key} is {other!r}, which only affects losses that are not supported (supported: "
                    f"{', '.join(LOSS_MODES)}); leave rl.policy_loss.{key} out"
                )
        mode = value.get("loss_mode", "vanilla")
    if mode not in LOSS_MODES:
        raise ConfigError(f"rl.policy_loss is {mode!r}: it must be one of {', '.join(LOSS_MODES)}")
    return settings | loss_mode(mode, rl)


def loss_mode(mode: str, rl: Rl) -> dict[str, Any]:
    if mode == "vanilla":
        return {"importance_sampling_level": "token"}
    if rl.get("clip_ratio_c") not in (None, DUAL_CLIP):
        raise ConfigError(
            f"rl.clip_ratio_c is {rl['clip_ratio_c']}, but the loss is {mode}, which has no dual clip in verl; leave "
            "rl.clip_ratio_c out"
        )
    if mode not in ("gspo", "sapo"):
        return {"importance_sampling_level": "token", "loss_type": LOSS_MODES[mode], "clip_ratio_c": None}
    if (aggregation := rl.get("loss_agg_mode", PER_SEQUENCE)) != PER_SEQUENCE:
        also = "rl.importance_sampling_level: sequence and " if mode == "gspo" else ""
        raise ConfigError(
            f"rl.loss_agg_mode is {aggregation!r} and the loss is {mode}; verl up to 0.8 ignores loss_agg_mode for "
            f"{mode} (it always uses {PER_SEQUENCE}), while verl 0.9 honours it; remove loss_agg_mode, or replace both "
            f"settings by {also}rl.loss_type"
        )
    if mode == "sapo":
        return {"importance_sampling_level": "token", "loss_type": "sapo", "clip_ratio_c": None}
    if rl.get("rollout_is") == "token":
        raise ConfigError(
            "rl.rollout_is is token and the loss is gspo, which has one ratio per sequence in Megalith (verl weights "
            "the gradient of each token separately); set rl.rollout_is to sequence, or leave it out"
        )
    return {"importance_sampling_level": "sequence", "loss_type": "grpo", "clip_ratio_c": None}


def loss_defaults(value: Any, rl: Rl) -> dict[str, Any]:
    """Return the bounds of CISPO, or the dual clip of verl's PPO."""
    return cispo_bounds(value, rl) if is_cispo(rl) else dual_clip(value, rl)


def cispo_bounds(value: Any, rl: Rl) -> dict[str, Any]:
    """Return the default bounds of verl and NeMo-RL, which clip the ratio on both sides."""
    return {"cispo_ratio_min": 1 - RATIO_CLIP, "epsilon_high": 1 + RATIO_CLIP} if is_cispo(rl) else {}


def dual_clip(value: Any, rl: Rl) -> dict[str, Any]:
    has_none = rl.get("loss_type") in WITHOUT_CLIP or is_per_sequence(rl) or rl.get("delta") is not None
    return {} if has_none else {"clip_ratio_c": DUAL_CLIP}


def use_cispo(value: bool, rl: Rl) -> dict[str, Any]:
    if value and rl.get("token_level_loss") is False:
        raise ConfigError(
            "rl.use_cispo is true and rl.token_level_loss false, but CISPO is a mean over tokens (NeMo-RL rejects "
            "this too); leave rl.token_level_loss out"
        )
    return {"loss_type": "cispo"} if value else {}


def aggregation(mode: str, rl: Rl) -> dict[str, Any]:
    has_mean = rl.get("loss_type") in (TOKEN_MEANS if mode == "token-mean" else SEQUENCE_MEANS)
    if (has_mean and mode in ("token-mean", PER_SEQUENCE)) or rl.get("loss_type") == "gmpo":
        return {}
    return {"loss_type": AGGREGATIONS[mode]}


def token_level_loss(value: bool, rl: Rl) -> dict[str, Any]:
    return aggregation("token-mean" if value else PER_SEQUENCE, rl)


def sequence_ratios(value: bool, rl: Rl) -> dict[str, Any]:
    if value and rl.get("token_level_loss"):
        raise ConfigError(
            "rl.sequence_level_importance_ratios and rl.token_level_loss are both true, but GSPO is a mean over "
            "sequences (NeMo-RL rejects this too); set rl.token_level_loss to false, or leave it out"
        )
    return {"importance_sampling_level": "sequence" if value else "token"}


def mean_of_sequences(value: bool, rl: Rl) -> dict[str, Any]:
    return {"loss_type": "grpo"} if value else {}


def scale_factor(value: int, rl: Rl) -> dict[str, Any]:
    if value != rl.get("max_completion_length", rl.get("max_response_length")):
        raise ConfigError(
            f"rl.loss_scale_factor is {value}, but the divisor of seq-mean-token-sum-norm is "
            "rl.max_completion_length; make the two equal, or leave rl.loss_scale_factor out"
        )
    return {}
