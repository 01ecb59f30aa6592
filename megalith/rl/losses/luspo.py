"""LUSPO: PPO's clip, summed within each sequence, averaged over sequences."""

from __future__ import annotations

from torch import Tensor

from megalith.config.rl import RlConfig
from megalith.rl.losses.grpo_loss import GrpoLoss, count_sequences


class Luspo(GrpoLoss):
    """Mean over sequences of the sequence's summed token loss, Σ m·ℓ with mask m."""

    def divisor(self, rl: RlConfig, sequence_tokens: Tensor) -> Tensor:
        return count_sequences(rl, sequence_tokens)
