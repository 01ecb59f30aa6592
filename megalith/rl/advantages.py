"""From rewards to advantages: how much better a completion is than the others of its prompt.

    reward     r_i = Σ_k w_k · r_ik                     over the rewards that are there; − DAPO's overlong penalty
    baseline   the mean of the group, or of the others in it (leave one out)
    advantage  A_i = (r_i − baseline) / (s + ε)         s: the group's standard deviation (n − 1), that of the others in
                                                        it, the batch's, or no division at all

A reward that is None or NaN is absent; a completion with none at all is in no baseline and has advantage 0. Everything
is computed in float64 on the host, from whole groups, so that no layout changes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megalith.config.rl import RlConfig
from megalith.errors import ConfigError

NO_SPREAD = 1e-8  # standard deviations up to this count as none


@dataclass(frozen=True)
class Advantages:
    """Of the groups of a rollout batch: float64 arrays [groups, completions of a group]."""

    rewards: np.ndarray  # the weighted sums; NaN where none was given
    values: np.ndarray
    spread: np.ndarray  # [groups]: the standard deviation of each


def total_rewards(rl: RlConfig, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Weighted sums [groups, completions] of rewards [groups, completions, kinds], NaN where all are absent.

    `lengths`: tokens of each completion, for the overlong penalty. Raises ConfigError for a wrong number of weights.
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
    """DAPO's: 0 up to max_completion_length − overlong_buffer_len, from there linear to overlong_penalty_factor."""
    if not rl.overlong_buffer_len:
        return np.zeros(lengths.shape)
    over = lengths - (rl.max_completion_length - rl.overlong_buffer_len)
    return rl.overlong_penalty_factor * np.clip(over / rl.overlong_buffer_len, 0.0, 1.0)


def advantages(rl: RlConfig, rewards: np.ndarray, lengths: np.ndarray) -> Advantages:
    """Of a rollout batch: rewards [groups, completions, kinds], lengths [groups, completions]."""
    total = total_rewards(rl, rewards, lengths)
    there = ~np.isnan(total)
    count = there.sum(-1, keepdims=True)  # [groups, 1]
    filled = np.where(there, total, 0.0)
    sums = filled.sum(-1, keepdims=True)
    mean = sums / np.maximum(count, 1)
    off = np.where(there, total - mean, 0.0)  # [groups, completions]
    spread = np.sqrt((off**2).sum(-1) / np.maximum(count[:, 0] - 1, 1))  # [groups]
    values = off
    if rl.advantage_baseline == "leave_one_out":
        others = (sums - filled) / np.maximum(count - 1, 1)
        values = np.where(there & (count > 1), total - others, 0.0)
    if rl.scale_rewards == "group" and rl.advantage_deviation == "others":
        deviations = _deviations_of_others(off, there)
        values = np.where(deviations > NO_SPREAD, values / (deviations + rl.advantage_epsilon), values)
    elif rl.scale_rewards == "group":
        values = values / (spread[:, None] + rl.advantage_epsilon)
    elif rl.scale_rewards == "batch":
        values = values / (_deviation(total[there]) + rl.advantage_epsilon)
    return Advantages(total, values, spread)


def _deviations_of_others(off: np.ndarray, there: np.ndarray) -> np.ndarray:
    """float64 [groups, completions], of the group without each completion; 0 for fewer than two others."""
    others = there[:, None, :] & ~np.eye(there.shape[1], dtype=bool)  # [groups, completions, completions]
    count = others.sum(-1, keepdims=True)
    means = np.where(others, off[:, None, :], 0.0).sum(-1, keepdims=True) / np.maximum(count, 1)
    squares = np.where(others, (off[:, None, :] - means) ** 2, 0.0).sum(-1)
    return np.sqrt(squares / np.maximum(count[..., 0] - 1, 1)) * (count[..., 0] > 1)


def _deviation(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
