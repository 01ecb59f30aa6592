"""OPO (Hao et al. 2025): the baseline with the least variance if gradients grow with length.

baseline   Σ length_i · r_i / Σ length_i over the group
advantage  A_i = r_i − baseline
"""

from __future__ import annotations

import numpy as np

from megalith.config.rl import RlConfig


def opo(rl: RlConfig, rewards: np.ndarray, *, lengths: np.ndarray) -> np.ndarray:
    """Return the advantages of a rollout batch, float64 [groups, completions]; 0 for completions without a reward.

    Args:
        rl: section `rl` of the configuration.
        rewards: weighted sums, float64 [groups, completions], NaN where absent.
        lengths: int [groups, completions], tokens per completion.
    """
    present = ~np.isnan(rewards)
    weights = np.where(present, lengths, 0)
    weighted = np.where(present, rewards, 0.0) * weights
    baseline = weighted.sum(-1, keepdims=True) / np.maximum(weights.sum(-1, keepdims=True), 1)
    return np.where(present, rewards - baseline, 0.0)
