"""The advantage estimator of PPO with a critic (Schulman et al. 2017). It returns the rewards; advantages are computed
later from the critic's values.

advantage  by generalized advantage estimation over the tokens (rl/advantages/gae.py)
"""

from __future__ import annotations

import numpy as np

from megalith.config.rl import RlConfig


def gae_rewards(rl: RlConfig, rewards: np.ndarray) -> np.ndarray:
    """Return the rewards, float64 [groups, completions]; 0 for absent ones."""
    return np.where(np.isnan(rewards), 0.0, rewards)
