"""GPG (Chu et al. 2025): the policy gradient without a ratio to the old policy, averaged over tokens."""

from __future__ import annotations

import math

from torch import Tensor

from megalith.config.rl import RlConfig
from megalith.rl.losses.grpo_loss import GrpoLoss


class Gpg(GrpoLoss):
    """Token loss −A · log π, with the advantage A."""

    def token_losses(self, rl: RlConfig, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        return -advantages * logprobs

    def clip_bounds(self, rl: RlConfig) -> tuple[float, float]:
        return 0.0, math.inf
