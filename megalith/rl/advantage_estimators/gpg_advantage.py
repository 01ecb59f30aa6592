"""GPG (Chu et al. 2025): centered rewards, multiplied by a factor that compensates for completions with reward 0.

advantage  A_i = α · (r_i − mean of the group)      α = completions of the batch / completions whose reward is not 0

The paper's factor counts groups without a gradient. This is verl's estimator, whose factor counts completions with
reward 0.
"""

from __future__ import annotations

import numpy as np

from megalith.config.rl import RlConfig
from megalith.rl.advantages.advantages import group_centered


def gpg(rl: RlConfig, rewards: np.ndarray) -> np.ndarray:
    """Return the advantages of a rollout batch, float64 [groups, completions]; 0 for completions without a reward.

    Args:
        rl: section `rl` of the configuration.
        rewards: weighted sums, float64 [groups, completions], NaN where absent.
    """
    present_rewards = rewards[~np.isnan(rewards)]
    alpha = len(present_rewards) / max(np.count_nonzero(present_rewards), 1)
    return alpha * group_centered(rewards)
