"""RLOO (Ahmadian et al. 2024): a completion's reward relative to the others of its group.

advantage  A_i = r_i − mean of the other rewards in the group
"""

from __future__ import annotations

import numpy as np

from megalith.config.rl import RlConfig


def rloo(rl: RlConfig, rewards: np.ndarray) -> np.ndarray:
    """Return the advantages of a rollout batch, float64 [groups, completions]; 0 for a completion without a reward,
    and if no other completion of the group has one.

    Args:
        rl: section `rl` of the configuration.
        rewards: weighted sums, float64 [groups, completions], NaN where absent.
    """
    present = ~np.isnan(rewards)
    count = present.sum(-1, keepdims=True)  # [groups, 1]
    present_rewards = np.where(present, rewards, 0.0)
    other_mean = (present_rewards.sum(-1, keepdims=True) - present_rewards) / np.maximum(count - 1, 1)
    return np.where(present & (count > 1), rewards - other_mean, 0.0)
