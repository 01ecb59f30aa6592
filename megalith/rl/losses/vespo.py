"""VESPO (Shen et al. 2026): log-probabilities weighted by a smooth function of the sequence's ratio, averaged over
tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalith.config.rl import RlConfig
from megalith.rl.losses.sequence_loss import SequenceLoss
from megalith.rl.objectives.sequences import Sequences

MIN_LOG_RATIO, MAX_LOG_RATIO = math.log(1e-8), 20.0  # of a sequence; TRL's clamps
MIN_LAMBDA = 1e-4


class Vespo(SequenceLoss):
    """Token loss −sg[φ(w)] · A · log π, with φ(w) = w^k · exp(λ · (1 − w)) and w the product of the ratios of the
    sequence.

    k and λ are rl.vespo_k_pos and rl.vespo_lambda_pos where A ≥ 0, otherwise rl.vespo_k_neg and rl.vespo_lambda_neg.
    The product w also includes the mismatch weights.
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
        log_w = log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        if mismatch is not None:
            log_w = log_w + mismatch.log().clamp(MIN_LOG_RATIO, MAX_LOG_RATIO)
        log_w = sequences.per_token(sequences.sums(log_w).clamp(MIN_LOG_RATIO, MAX_LOG_RATIO))
        is_positive = advantages >= 0
        k = torch.where(is_positive, rl.vespo_k_pos, rl.vespo_k_neg)
        rate = torch.where(is_positive, rl.vespo_lambda_pos, rl.vespo_lambda_neg).clamp(min=MIN_LAMBDA)
        phi = (rate + k * log_w - rate * log_w.exp()).exp()
        return -phi.nan_to_num(nan=0.0, posinf=0.0) * advantages * logprobs

    def clip_bounds(self, rl: RlConfig) -> tuple[float, float]:
        return 0.0, math.inf
