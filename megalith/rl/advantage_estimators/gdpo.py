"""GDPO (Liu et al. 2026): several rewards, each standardized before they are summed (TRL's `normalize_then_sum`).

z_ik       (r_ik − mean of the group) / (standard deviation of the group + ε)      for each reward k
s_i        Σ_k w_k · z_ik over the rewards that are present
advantage  A_i = (s_i − mean of s) / (standard deviation of s + ε)      over the rollout batch

Standard deviations divide by n − 1; ε is rl.advantage_epsilon. The overlong penalty counts as one more reward.
"""

from __future__ import annotations

import numpy as np

from megalith.config.rl import RlConfig
from megalith.rl.advantages.advantages import batch_std, group_centered, group_std, weighted_sum


def gdpo(rl: RlConfig, rewards: np.ndarray, *, reward_kinds: np.ndarray) -> np.ndarray:
    """Return the advantages of a rollout batch, float64 [groups, completions]; 0 for completions without a reward.

    Args:
        rl: section `rl` of the configuration.
        rewards: weighted sums, float64 [groups, completions], NaN where absent.
        reward_kinds: each reward without its weight, float64 [groups, completions, kinds], NaN where absent.
    """
    kinds = np.moveaxis(reward_kinds, -1, 0)  # [kinds, groups, completions]
    scaled = [group_centered(each) / (group_std(each)[:, None] + rl.advantage_epsilon) for each in kinds]
    scaled = np.where(np.isnan(reward_kinds), np.nan, np.stack(scaled, axis=-1))
    sums = weighted_sum(rl, scaled)
    penalty = rewards - weighted_sum(rl, reward_kinds)  # at most 0, apart from rounding
    if rl.overlong_buffer_len:
        sums = sums + group_centered(penalty) / (group_std(penalty)[:, None] + rl.advantage_epsilon)
    present = ~np.isnan(sums)
    if not present.any():
        return np.zeros_like(sums)
    centered = np.where(present, sums - sums[present].mean(), 0.0)
    return centered / (batch_std(sums) + rl.advantage_epsilon)
