"""Clip-Cov (Cui et al. 2025): PPO's clip, averaged over tokens, with a loss of 0 for some tokens. Their covariance of
advantage and log-probability is high.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.config.rl import RlConfig
from megalith.rl.losses.selective_loss import SelectiveLoss, StepTokens, selected_count


class ClipCov(SelectiveLoss):
    """PPO's clip, with a loss of 0 for randomly selected tokens among those with high covariance.

    They are chosen among the tokens that are not clipped and have a covariance between rl.clip_cov_lb and
    rl.clip_cov_ub. Their number is the fraction rl.clip_cov_ratio of all tokens, or less if there are fewer such
    tokens.
    """

    def select(self, rl: RlConfig, tokens: StepTokens) -> Tensor:
        ratio = (tokens.logprobs - tokens.old_logprobs).exp()
        clipped = ratio.clamp(1 - rl.epsilon, 1 + rl.upper_epsilon)
        is_clipped = ratio * tokens.advantages > clipped * tokens.advantages
        covariances = tokens.covariances
        in_bounds = (covariances > rl.clip_cov_lb) & (covariances < rl.clip_cov_ub)
        candidates = (in_bounds & ~is_clipped).nonzero().flatten()
        count = selected_count(rl.clip_cov_ratio, covariances)
        order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(tokens.seed))
        return candidates[order[:count].to(candidates.device)]

    def selected_losses(self, rl: RlConfig, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        return torch.zeros_like(ratio)
