"""CISPO (MiniMax 2025): log-probabilities weighted by a capped ratio without gradient, averaged over tokens."""

from __future__ import annotations

from torch import Tensor

from megalith.config.rl import RlConfig
from megalith.rl.losses.grpo_loss import GrpoLoss


class Cispo(GrpoLoss):
    """Token loss −sg[clip(r, rl.cispo_ratio_min, rl.epsilon_high)] · A · log π, with r = π / π_old; sg stops
    gradients."""

    def token_losses(self, rl: RlConfig, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        return -ratio.detach().clamp(rl.cispo_ratio_min, rl.upper_epsilon) * advantages * logprobs

    def clip_bounds(self, rl: RlConfig) -> tuple[float, float]:
        return rl.cispo_ratio_min or 0.0, rl.upper_epsilon
