"""KL-Cov (Cui et al. 2025): a KL penalty for the tokens whose covariance of advantage and log-probability is largest,
averaged over tokens."""

from __future__ import annotations

import math

from torch import Tensor

from megalith.config.rl import RlConfig
from megalith.rl.losses.selective_loss import SelectiveLoss, StepTokens, selected_count


class KlCov(SelectiveLoss):
    """Token loss −r · A with r = π / π_old, plus rl.ppo_kl_coef · |log r| for the fraction rl.kl_cov_ratio of the
    tokens. Nothing is clipped."""

    def select(self, rl: RlConfig, tokens: StepTokens) -> Tensor:
        covariances = tokens.covariances
        count = selected_count(rl.kl_cov_ratio, covariances)
        return covariances.argsort(descending=True, stable=True)[:count]

    def token_losses(self, rl: RlConfig, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        return -ratio * advantages

    def selected_losses(self, rl: RlConfig, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        return -ratio * advantages + rl.ppo_kl_coef * ratio.log().abs()

    def clip_bounds(self, rl: RlConfig) -> tuple[float, float]:
        return 0.0, math.inf
