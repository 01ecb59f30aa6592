"""Group-relative advantages from rewards.

    reward     r_i = Σ_k w_k · r_ik − DAPO's overlong penalty      over the rewards that are present
    baseline   mean of the group, or of the other completions in it (leave one out)
    advantage  A_i = (r_i − baseline) / (s + ε)      s: standard deviation (n − 1) of the group, of the other
                                                     completions in it, or of the rollout batch; or no division

A reward of None or NaN is absent. A completion without any reward is in no baseline and has advantage 0. The arithmetic
is float64 on the host over complete groups, so that results are the same in every layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megalith.config.rl import RlConfig
from megalith.errors import ConfigError

ZERO_STD = 1e-8  # standard deviations up to this count as 0


@dataclass(frozen=True)
class Advantages:
    """Rewards and advantages of a rollout batch: float64 arrays [groups, completions per group]."""

    rewards: np.ndarray  # weighted sums; NaN if all are absent
    values: np.ndarray
    group_std: np.ndarray  # [groups]: standard deviation of the rewards


def total_rewards(rl: RlConfig, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the weighted sum of each completion's rewards, minus the overlong penalty.

    Args:
        rl: section `rl` of the configuration.
        rewards: float64 [groups, completions, kinds], NaN where absent.
        lengths: int [groups, completions], tokens per completion.

    Returns:
        float64 [groups, completions], NaN where all rewards are absent.

    Raises:
        ConfigError: if `rl.reward_weights` does not have one weight per kind of reward.
    """
    kinds = rewards.shape[-1]
    weights = [1.0] * kinds if rl.reward_weights is None else rl.reward_weights
    if len(weights) != kinds:
        raise ConfigError(
            f"rl.reward_weights has {len(weights)} weights, but the rollouts have {kinds} rewards each; give one for "
            "each reward"
        )
    absent = np.isnan(rewards)
    sums = np.where(absent, 0.0, rewards * np.asarray(weights)).sum(-1) - overlong_penalty(rl, lengths)
    return np.where(absent.all(-1), np.nan, sums)


def overlong_penalty(rl: RlConfig, lengths: np.ndarray) -> np.ndarray:
    """Return DAPO's length penalty [groups, completions].

    It is 0 up to max_completion_length − overlong_buffer_len tokens and grows linearly to overlong_penalty_factor.
    """
    if not rl.overlong_buffer_len:
        return np.zeros(lengths.shape)
    over = lengths - (rl.max_completion_length - rl.overlong_buffer_len)
    return rl.overlong_penalty_factor * np.clip(over / rl.overlong_buffer_len, 0.0, 1.0)


def compute_advantages(rl: RlConfig, rewards: np.ndarray, lengths: np.ndarray) -> Advantages:
    """Return the advantages of a rollout batch.

    Args:
        rl: section `rl` of the configuration.
        rewards: float64 [groups, completions, kinds], NaN where absent.
        lengths: int [groups, completions], tokens per completion.
    """
    total = total_rewards(rl, rewards, lengths)
    present = ~np.isnan(total)
    count = present.sum(-1, keepdims=True)  # [groups, 1]
    present_rewards = np.where(present, total, 0.0)
    sums = present_rewards.sum(-1, keepdims=True)
    mean = sums / np.maximum(count, 1)
    centered = np.where(present, total - mean, 0.0)  # [groups, completions]
    group_std = np.sqrt((centered**2).sum(-1) / np.maximum(count[:, 0] - 1, 1))  # [groups]
    values = centered
    if rl.advantage_baseline == "leave_one_out":
        other_mean = (sums - present_rewards) / np.maximum(count - 1, 1)
        values = np.where(present & (count > 1), total - other_mean, 0.0)
    if rl.scale_rewards == "group" and rl.advantage_deviation == "others":
        std = _leave_one_out_std(centered, present)
        values = np.where(std > ZERO_STD, values / (std + rl.advantage_epsilon), values)
    elif rl.scale_rewards == "group":
        values = values / (group_std[:, None] + rl.advantage_epsilon)
    elif rl.scale_rewards == "batch":
        values = values / (_std(total[present]) + rl.advantage_epsilon)
    return Advantages(total, values, group_std)


def _leave_one_out_std(centered: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Return the group's standard deviation without each completion, float64 [groups, completions]; 0 for fewer than
    two."""
    others = present[:, None, :] & ~np.eye(present.shape[1], dtype=bool)  # [groups, completions, completions]
    count = others.sum(-1, keepdims=True)
    means = np.where(others, centered[:, None, :], 0.0).sum(-1, keepdims=True) / np.maximum(count, 1)
    squares = np.where(others, (centered[:, None, :] - means) ** 2, 0.0).sum(-1)
    return np.sqrt(squares / np.maximum(count[..., 0] - 1, 1)) * (count[..., 0] > 1)


def _std(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
