"""PPO's clip, summed over the tokens of the step without a divisor (verl's token-sum)."""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.config.rl import RlConfig
from megalith.rl.losses.grpo_loss import GrpoLoss


class TokenSum(GrpoLoss):
    """Sum of the token losses ℓ over the tokens in the loss (mask m): Σ m·ℓ."""

    def divisor(self, rl: RlConfig, sequence_tokens: Tensor) -> Tensor:
        return torch.zeros(
            (), dtype=torch.float64, device=sequence_tokens.device
        )  # a step's divisor of 0 counts as 1
