"""RLOO's loss in TRL: PPO's clip of the ratio of whole sequences, averaged over sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.config.rl import RlConfig
from megalith.rl.losses.grpo_sequence_mean import Grpo
from megalith.rl.losses.sequence_loss import SequenceLoss
from megalith.rl.objectives.sequences import Sequences


class RlooLoss(SequenceLoss, Grpo):
    """Sequence loss −min(R·A, clip(R, 1 − rl.epsilon, 1 + rl.epsilon_high)·A) per sequence, with R the product of its
    tokens' ratios.

    Each token's share of the loss is multiplied by the token's mismatch weight.
    """

    def sequence_losses(
        self,
        rl: RlConfig,
        log_ratio: Tensor,
        logprobs: Tensor,
        advantages: Tensor,
        mismatch: Tensor | None,
        sequences: Sequences,
    ) -> Tensor:
        ratio = sequences.per_token(sequences.sums(log_ratio).exp())
        clipped = ratio.clamp(1 - rl.epsilon, 1 + rl.upper_epsilon)
        losses = -torch.min(ratio * advantages, clipped * advantages)
        return losses if mismatch is None else losses * mismatch
