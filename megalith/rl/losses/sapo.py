"""SAPO (Gao et al. 2025): a sigmoid gate in place of the clip, averaged within each sequence, then over sequences."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalith.config.rl import RlConfig
from megalith.rl.losses.grpo_sequence_mean import Grpo


class Sapo(Grpo):
    """Token loss −(4 / τ) · σ(τ · (r − 1)) · A, with r = π / π_old and τ = rl.sapo_temperature_pos if A > 0, otherwise
    rl.sapo_temperature_neg."""

    def token_losses(self, rl: RlConfig, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        temperature = torch.where(advantages > 0, rl.sapo_temperature_pos, rl.sapo_temperature_neg)
        return -torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantages

    def clip_bounds(self, rl: RlConfig) -> tuple[float, float]:
        return 0.0, math.inf
