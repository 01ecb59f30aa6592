"""GMPO (Zhao et al. 2025): the geometric mean of the clipped ratios of a sequence, averaged over sequences."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalith.config.rl import RlConfig
from megalith.rl.losses.grpo_sequence_mean import Grpo
from megalith.rl.losses.sequence_loss import SequenceLoss
from megalith.rl.objectives.sequences import Sequences

MIN_WEIGHT = 1e-10  # added to mismatch weights before the logarithm, as in verl


class Gmpo(SequenceLoss, Grpo):
    """Sequence loss −A · exp(mean of s · min(s·d, s·clip(d, −rl.epsilon, rl.epsilon_high))), with d = log r and s the
    sign of A.

    Mismatch weights enter as their geometric mean over the sequence.
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
        sign = advantages.sign()
        clipped = log_ratio.clamp(-rl.epsilon, rl.upper_epsilon)
        log_mean = sequences.means(sign * torch.min(sign * log_ratio, sign * clipped))
        if mismatch is not None:
            log_mean = log_mean + sequences.means((mismatch + MIN_WEIGHT).log())
        return -advantages * sequences.per_token(log_mean.exp())

    def clip_bounds(self, rl: RlConfig) -> tuple[float, float]:
        return math.exp(-rl.epsilon), math.exp(rl.upper_epsilon)
