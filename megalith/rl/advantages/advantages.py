"""Advantages of completions from their rewards.

    r_i = Σ_k w_k · r_ik − DAPO's overlong penalty      over the rewards that are present

A reward of None or NaN is absent; a completion without any reward has advantage 0. `rl.advantage_estimator` computes
advantages from r (advantage_estimators/). The arithmetic is float64 on the host over complete groups, so that results
are the same in every layout.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megalith.config.extensions import ADVANTAGE_ESTIMATORS
from megalith.config.load_extension import load_extension
from megalith.config.rl import RlConfig
from megalith.errors import ConfigError, DataError

ZERO_STD = 1e-8  # standard deviations up to this count as 0


@dataclass(frozen=True)
class Advantages:
    """Rewards and advantages of a rollout batch: float64 arrays [groups, completions per group]."""

    rewards: np.ndarray  # weighted sums; NaN if all are absent
    values: np.ndarray
    group_std: np.ndarray  # [groups]: standard deviation of the rewards


def total_rewards(rl: RlConfig, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the weighted sum of each completion's rewards, clipped to rl.reward_clip_range, minus the overlong
    penalty.

    Args:
        rl: section `rl` of the configuration.
        rewards: float64 [groups, completions, kinds], NaN where absent.
        lengths: int [groups, completions], tokens per completion.

    Returns:
        float64 [groups, completions], NaN where all rewards are absent.

    Raises:
        ConfigError: if `rl.reward_weights` does not have one weight per kind of reward.
    """
    total = weighted_sum(rl, rewards)
    if rl.reward_clip_range is not None:
        total = np.clip(total, *rl.reward_clip_range)
    return total - overlong_penalty(rl, lengths)


def weighted_sum(rl: RlConfig, rewards: np.ndarray) -> np.ndarray:
    """Return Σ_k `rl.reward_weights`_k · rewards_k over the rewards that are present; NaN without any reward.

    The environment's reward is the last one. Its weight is 1 unless `rl.reward_weights` has one for it.

    Args:
        rl: section `rl` of the configuration.
        rewards: float64 [groups, completions, kinds], NaN where absent.

    Raises:
        ConfigError: if `rl.reward_weights` does not have one weight per kind of reward.
    """
    kinds = rewards.shape[-1]
    weights = [1.0] * kinds if rl.reward_weights is None else rl.reward_weights
    if rl.environment and len(weights) == kinds - 1:  # as in TRL, the environment's own reward has weight 1
        weights = [*weights, 1.0]
    if len(weights) != kinds:
        raise ConfigError(
            f"rl.reward_weights has {len(weights)} weights, but each rollout has {kinds} rewards; list one "
            "weight per reward"
        )
    absent = np.isnan(rewards)
    sums = np.where(absent, 0.0, rewards * np.asarray(weights)).sum(-1)
    return np.where(absent.all(-1), np.nan, sums)


def overlong_penalty(rl: RlConfig, lengths: np.ndarray) -> np.ndarray:
    """Return DAPO's length penalty, float64 [groups, completions].

    It is 0 up to max_completion_length − overlong_buffer_len tokens, then grows linearly and reaches
    overlong_penalty_factor at max_completion_length tokens.
    """
    if not rl.overlong_buffer_len:
        return np.zeros(lengths.shape)
    over = lengths - (rl.max_completion_length - rl.overlong_buffer_len)
    return rl.overlong_penalty_factor * np.clip(over / rl.overlong_buffer_len, 0.0, 1.0)


def compute_advantages(rl: RlConfig, rewards: np.ndarray, lengths: np.ndarray) -> Advantages:
    """Return the advantages of a rollout batch, by `rl.advantage_estimator`.

    Args:
        rl: section `rl` of the configuration.
        rewards: float64 [groups, completions, kinds], NaN where absent.
        lengths: int [groups, completions], tokens per completion.

    Raises:
        ConfigError: if `rl.reward_weights` does not have one weight per kind of reward.
        DataError: if a user's estimator does not return one finite number per completion.
    """
    total = total_rewards(rl, rewards, lengths)
    return Advantages(total, apply_estimator(rl, total, lengths, rewards), group_std(total))


def apply_estimator(
    rl: RlConfig, total: np.ndarray, lengths: np.ndarray, rewards: np.ndarray | None = None
) -> np.ndarray:
    """Return the advantages of weighted rewards, float64 [groups, completions].

    Args:
        rl: section `rl` of the configuration.
        total: weighted rewards, float64 [groups, completions], NaN where absent.
        lengths: int [groups, completions], tokens per completion.
        rewards: float64 [groups, completions, kinds]. Default: only `total`.

    Raises:
        DataError: if a user's estimator does not return one finite number per completion.
    """
    estimator = load_estimator(rl.advantage_estimator)
    optional = {"lengths": lengths, "reward_kinds": total[..., None] if rewards is None else rewards}
    named = {name: optional[name] for name in inspect.signature(estimator).parameters if name in optional}
    values = np.asarray(estimator(rl, total, **named), dtype=np.float64)
    if values.shape != total.shape:
        raise DataError(
            f"rl.advantage_estimator {rl.advantage_estimator} returned values of shape {list(values.shape)} for "
            f"{list(total.shape)} completions; return one finite number per completion"
        )
    if not np.isfinite(values).all():
        raise DataError(
            f"rl.advantage_estimator {rl.advantage_estimator} returned NaN or Inf; return one finite number per "
            "completion"
        )
    return whitened(rl, values, ~np.isnan(total)) if rl.whiten_advantages else values


def whitened(rl: RlConfig, advantages: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Return the advantages minus their mean over the rollout batch, divided by their standard deviation (n − 1) plus
    rl.advantage_epsilon; 0 where there is no reward."""
    values = advantages[present]
    if len(values) < 2:
        return np.zeros_like(advantages)
    scale = values.std(ddof=1) + rl.advantage_epsilon
    return np.where(present, (advantages - values.mean()) / scale, 0.0)


@functools.cache
def load_estimator(name: str) -> Callable[..., np.ndarray]:
    """Load the advantage estimator that `rl.advantage_estimator` names. Raise ConfigError if it does not exist.

    An estimator is called with section `rl` and the weighted rewards, float64 [groups, completions] with NaN where
    absent, and must return the advantages in the same shape. If it has parameters of these names, it also gets
    `lengths`, the tokens of each completion, int [groups, completions], and `reward_kinds`, the rewards without their
    weights, float64 [groups, completions, kinds].
    """
    return load_extension(name, ADVANTAGE_ESTIMATORS, "rl.advantage_estimator")


def group_centered(rewards: np.ndarray) -> np.ndarray:
    """Return the rewards minus the mean of the rewards present in their group, [groups, completions]; 0 where
    absent."""
    present = ~np.isnan(rewards)
    count = present.sum(-1, keepdims=True)  # [groups, 1]
    mean = np.where(present, rewards, 0.0).sum(-1, keepdims=True) / np.maximum(count, 1)
    return np.where(present, rewards - mean, 0.0)


def group_std(rewards: np.ndarray) -> np.ndarray:
    """Return the standard deviation (n − 1) of each group's present rewards, [groups]; 0 for fewer than two."""
    count = (~np.isnan(rewards)).sum(-1)
    return np.sqrt((group_centered(rewards) ** 2).sum(-1) / np.maximum(count - 1, 1))


def batch_std(rewards: np.ndarray) -> float:
    """Return the standard deviation (n − 1) of all present rewards; 0 for fewer than two."""
    values = rewards[~np.isnan(rewards)]
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def reward_scale(rl: RlConfig, rewards: np.ndarray) -> np.ndarray | float:
    """Return the divisor of the advantages according to `rl.scale_rewards`, broadcastable to [groups, completions]."""
    match rl.scale_rewards:
        case "group":
            return group_std(rewards)[:, None] + rl.advantage_epsilon
        case "batch":
            return batch_std(rewards) + rl.advantage_epsilon
        case _:
            return 1.0
