"""Advantages for pass@k (Tang et al. 2025): only the best completion of a group gets a nonzero advantage.

A_best = (largest reward − second largest reward) / (s + ε)

s is the standard deviation over the group or batch, as `rl.scale_rewards` selects, and ε is `rl.advantage_epsilon`.
With `rl.scale_rewards: none`, the divisor is 1.
"""

from __future__ import annotations

import numpy as np

from megalith.config.rl import RlConfig
from megalith.rl.advantages.advantages import reward_scale


def grpo_passk(rl: RlConfig, rewards: np.ndarray) -> np.ndarray:
    """Return the advantages of a rollout batch, float64 [groups, completions]; 0 in a group with fewer than 2 rewards.

    Args:
        rl: section `rl` of the configuration.
        rewards: weighted sums, float64 [groups, completions], NaN where absent.
    """
    present = ~np.isnan(rewards)
    filled = np.where(present, rewards, -np.inf)
    filled[present.sum(-1) < 2] = 0.0
    second, first = np.sort(filled, axis=-1)[:, -2:].T  # [groups] each
    values = np.zeros_like(rewards)
    values[np.arange(len(rewards)), filled.argmax(-1)] = first - second
    return values / reward_scale(rl, rewards)
