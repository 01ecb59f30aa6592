"""GRPO's advantage: a completion's reward relative to its group.

baseline   mean of the group, or of the other completions in it (rl.advantage_baseline)
advantage  A_i = (r_i − baseline) / (s + ε)      s: standard deviation (n − 1) of the group, of the other completions
                                                 in it, or of the rollout batch; or no division (rl.scale_rewards)

With the deviation of the other completions (rl.advantage_deviation), there is no division where it is 0.
"""

from __future__ import annotations

import numpy as np

from megalith.config.rl import RlConfig
from megalith.rl.advantage_estimators.rloo import rloo
from megalith.rl.advantages.advantages import ZERO_STD, group_centered, reward_scale


def group_relative(rl: RlConfig, rewards: np.ndarray) -> np.ndarray:
    """Return the advantages of a rollout batch, float64 [groups, completions]; 0 for completions without a reward.

    Args:
        rl: section `rl` of the configuration.
        rewards: weighted sums, float64 [groups, completions], NaN where absent.
    """
    centered = group_centered(rewards)
    values = rloo(rl, rewards) if rl.advantage_baseline == "leave_one_out" else centered
    if rl.scale_rewards == "group" and rl.advantage_deviation == "others":
        std = _leave_one_out_std(centered, ~np.isnan(rewards))
        return np.where(std > ZERO_STD, values / (std + rl.advantage_epsilon), values)
    return values / reward_scale(rl, rewards)


def _leave_one_out_std(centered: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Return, for each completion, the standard deviation of the other rewards in its group, float64 [groups,
    completions]; 0 for fewer than two others."""
    others = present[:, None, :] & ~np.eye(present.shape[1], dtype=bool)  # [groups, completions, completions]
    count = others.sum(-1, keepdims=True)
    means = np.where(others, centered[:, None, :], 0.0).sum(-1, keepdims=True) / np.maximum(count, 1)
    squares = np.where(others, (centered[:, None, :] - means) ** 2, 0.0).sum(-1)
    return np.sqrt(squares / np.maximum(count[..., 0] - 1, 1)) * (count[..., 0] > 1)
