"""REINFORCE++ (Hu et al. 2025): rewards standardized over the tokens of the rollout batch.

r'         r_i, or r_i − mean of the group (the baseline variant)
advantage  A_i = (r'_i − mean of r') / √(variance of r' + 1e-8)

Mean and variance are over tokens; each token has the r' of its completion. The discount is 1. verl's estimators of the
same names compute the same values.
"""

from __future__ import annotations

import numpy as np

from megalith.config.rl import RlConfig
from megalith.rl.advantages.advantages import group_centered

VARIANCE_EPSILON = 1e-8


def reinforce_plus_plus(rl: RlConfig, rewards: np.ndarray, *, lengths: np.ndarray) -> np.ndarray:
    """Return the rewards standardized over the batch's tokens, float64 [groups, completions]; 0 where absent.

    Args:
        rl: section `rl` of the configuration.
        rewards: weighted sums, float64 [groups, completions], NaN where absent.
        lengths: int [groups, completions], tokens per completion.
    """
    present = ~np.isnan(rewards)
    return _standardized(np.where(present, rewards, 0.0), np.where(present, lengths, 0))


def reinforce_plus_plus_baseline(rl: RlConfig, rewards: np.ndarray, *, lengths: np.ndarray) -> np.ndarray:
    """Return the rewards minus their group's mean, standardized as in `reinforce_plus_plus`. Same arguments."""
    return _standardized(group_centered(rewards), np.where(np.isnan(rewards), 0, lengths))


def _standardized(values: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return `values` minus their mean, divided by their standard deviation (n − 1). Each value is weighted by its
    number of tokens. The result is 0 for values without tokens.
    """
    count = max(tokens.sum(), 1)
    centered = np.where(tokens > 0, values - (tokens * values).sum() / count, 0.0)
    variance = (tokens * centered**2).sum() / max(count - 1, 1)
    return centered / np.sqrt(variance + VARIANCE_EPSILON)
