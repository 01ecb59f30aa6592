"""verl's and NeMo-RL's spellings of the correction for differences between engine and trainer."""

from __future__ import annotations

from typing import Any

from megalith.config.rules.spellings.spelling import Rl, is_per_sequence
from megalith.errors import ConfigError

TRUNCATIONS = {"tis": "truncate", "icepop": "mask", "seq-mask-tis": "geometric_mask"}
MIN_WEIGHTS = {"icepop": 0.5, "seq-mask-tis": 0.999}
ROLLOUT_CORRECTION = {  # keys of verl's section, with its defaults
    "_target_": None,
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "bypass_mode": False,
    "loss_type": "ppo_clip",
    "rollout_is_batch_normalize": False,
}


def rollout_is(level: str | None, rl: Rl) -> dict[str, Any]:
    if level is None:
        return {"vllm_importance_sampling_correction": False}
    beyond = "mask" if _two_bounds(rl.get("rollout_is_threshold")) else "truncate"
    return {"vllm_importance_sampling_mode": f"{level}_{beyond}"}


def _two_bounds(threshold: Any) -> list[str] | None:
    """Split verl's "lower_upper", outside of which weights are 0; None for a single bound."""
    parts = threshold.split("_") if isinstance(threshold, str) else []
    return parts if len(parts) == 2 else None


def rollout_threshold(value: Any, rl: Rl) -> dict[str, Any]:
    if bounds := _two_bounds(value):
        return {
            "vllm_importance_sampling_mode": rl.get("vllm_importance_sampling_mode", "token_mask"),
            "vllm_importance_sampling_clip_min": bounds[0],
            "vllm_importance_sampling_clip_max": bounds[1],
        }
    return {"vllm_importance_sampling_clip_max": value}


def bypass(value: bool, rl: Rl) -> dict[str, Any]:
    return {"old_logprobs": "rollout" if value else "policy"}


def rollout_correction(value: Any, rl: Rl) -> dict[str, Any]:
    """Return the settings of verl's section algorithm.rollout_correction."""
    if not isinstance(value, dict):
        raise ConfigError(
            f"rl.rollout_correction is {value!r}; write a mapping, such as {{rollout_is: token}}"
        )
    keys = {name: default for name, default in ROLLOUT_CORRECTION.items() if name != "_target_"}
    unknown = [key for key in value if key not in ROLLOUT_CORRECTION]
    if unknown:
        raise ConfigError(
            f"rl.rollout_correction.{unknown[0]} is not a setting; the settings are {', '.join(keys)}"
        )
    keys |= value
    settings = rollout_is(keys["rollout_is"], keys)
    if keys["rollout_is"] is not None:
        settings |= rollout_threshold(keys["rollout_is_threshold"], {**rl, **settings})
    for name in ("rollout_rs", "rollout_rs_threshold", "rollout_is_batch_normalize"):
        if keys[name] != ROLLOUT_CORRECTION[name]:
            settings[name] = keys[name]
    if not keys["bypass_mode"]:
        return settings
    if keys["loss_type"] not in ("ppo_clip", "reinforce"):
        raise ConfigError(
            f"rl.rollout_correction.loss_type is {keys['loss_type']!r}: it must be one of ppo_clip, reinforce"
        )
    if keys["loss_type"] == "reinforce":
        if (aggregation := rl.get("loss_agg_mode", "token-mean")) != "token-mean":
            raise ConfigError(
                f"rl.rollout_correction.loss_type is reinforce and rl.loss_agg_mode {aggregation!r}, but reinforce "
                "is always a mean over tokens; leave rl.loss_agg_mode out"
            )
        settings |= {"loss_type": "reinforce", "clip_ratio_c": None}
    return settings | bypass(True, rl)


def correction(value: bool, rl: Rl) -> dict[str, Any]:
    return {"vllm_importance_sampling_correction": value}


def unbounded(value: bool, rl: Rl) -> dict[str, Any]:
    """Return the settings for NeMo-RL's correction without a truncation type: truncate if a maximum is set, else
    unbounded.
    """
    if not value:
        return {}
    level = "sequence" if is_per_sequence(rl) else "token"
    is_bounded = rl.get("vllm_importance_sampling_clip_max") is not None
    return {"vllm_importance_sampling_mode": f"{level}_{'truncate' if is_bounded else 'unbounded'}"}


def truncation(kind: str, rl: Rl) -> dict[str, Any]:
    if kind == "seq-mask-tis":
        if is_per_sequence(rl):
            raise ConfigError(
                "rl.truncated_importance_sampling_type is seq-mask-tis, whose weights are per token, and "
                "rl.sequence_level_importance_ratios is true, which NeMo-RL also rejects; set "
                "rl.truncated_importance_sampling_type to tis or icepop"
            )
        return {"vllm_importance_sampling_mode": TRUNCATIONS[kind]}
    level = "sequence" if is_per_sequence(rl) else "token"
    return {"vllm_importance_sampling_mode": f"{level}_{TRUNCATIONS[kind]}"}


def min_weight(kind: str, rl: Rl) -> dict[str, Any]:
    """Return the lower bound of the weights for a NeMo-RL truncation type. Default: the one in NeMo-RL's
    documentation.
    """
    bound = MIN_WEIGHTS.get(kind)
    return {} if bound is None else {"vllm_importance_sampling_clip_min": bound}
