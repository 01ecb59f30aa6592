"""GRPO (Shao et al. 2024): PPO's clip, averaged within each sequence, then over sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.config.rl import RlConfig
from megalith.rl.losses.grpo_loss import GrpoLoss, count_sequences
from megalith.rl.objectives.sequences import Sequences


class Grpo(GrpoLoss):
    """Mean over sequences of the sequence's mean token loss, Σ m·ℓ / Σ m with mask m."""

    def token_weights(self, rl: RlConfig, sequences: Sequences, dtype: torch.dtype = torch.float32) -> Tensor:
        return sequences.mask.to(dtype) / sequences.per_token(sequences.tokens.clamp(min=1))

    def divisor(self, rl: RlConfig, sequence_tokens: Tensor) -> Tensor:
        return count_sequences(rl, sequence_tokens)
