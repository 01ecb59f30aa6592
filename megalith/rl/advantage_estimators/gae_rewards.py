"""PPO with a critic (Schulman et al. 2017): the estimator passes the rewards on, and the critic replaces them.

advantage  by generalized advantage estimation over the tokens (rl/gae.py)
"""

from __future__ import annotations

import numpy as np

from megalith.config.rl import RlConfig


def gae_rewards(rl: RlConfig, rewards: np.ndarray) -> np.ndarray:
    """Return the rewards, float64 [groups, completions]; 0 for absent ones."""
    return np.where(np.isnan(rewards), 0.0, rewards)
