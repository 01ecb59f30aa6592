"""Dr. GRPO (Liu et al. 2025): PPO's clip, summed and divided by a constant per sequence."""

from __future__ import annotations

from torch import Tensor

from megalith.config.rl import RlConfig
from megalith.rl.losses.grpo_loss import GrpoLoss, count_sequences


class DrGrpo(GrpoLoss):
    """Sum of the token losses ℓ with mask m, divided by a constant: Σ m·ℓ / (sequences · rl.max_completion_length)."""

    def divisor(self, rl: RlConfig, sequence_tokens: Tensor) -> Tensor:
        return count_sequences(rl, sequence_tokens) * rl.max_completion_length
