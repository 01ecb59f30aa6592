"""Preference losses that are functions of the margin h between the two answers' log ratios to the reference.

Names and formulas are from TRL's DPOTrainer; docs/preference.md lists them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megalith.config.preferences import DpoConfig
from megalith.rl.preference_losses.answer_pairs import AnswerPairs


def sigmoid(dpo: DpoConfig, pairs: AnswerPairs) -> Tensor:
    """Return −(1 − λ) · log σ(β·h) − λ · log σ(−β·h), [pairs] (DPO, Rafailov et al. 2023)."""
    return smoothed(dpo, pairs.margin)


def hinge(dpo: DpoConfig, pairs: AnswerPairs) -> Tensor:
    """Return max(0, 1 − β·h), [pairs] (Zhao et al. 2023)."""
    return torch.relu(1 - dpo.beta * pairs.margin)


def ipo(dpo: DpoConfig, pairs: AnswerPairs) -> Tensor:
    """Return (h̄ − 1 / 2β)², [pairs], where h̄ is the margin of means over tokens (Azar et al. 2023)."""
    return (pairs.mean_margin - 1 / (2 * dpo.beta)).square()


def robust(dpo: DpoConfig, pairs: AnswerPairs) -> Tensor:
    """Return (λ · log σ(−β·h) − (1 − λ) · log σ(β·h)) / (1 − 2λ), [pairs] (Chowdhury et al. 2024)."""
    scaled, smoothing = dpo.beta * pairs.margin, dpo.label_smoothing
    return (smoothing * logsigmoid(-scaled) - (1 - smoothing) * logsigmoid(scaled)) / (1 - 2 * smoothing)


def sigmoid_norm(dpo: DpoConfig, pairs: AnswerPairs) -> Tensor:
    """Return −log σ(β·h̄), [pairs], where h̄ is the margin of means over tokens."""
    return -logsigmoid(dpo.beta * pairs.mean_margin)


def exo_pair(dpo: DpoConfig, pairs: AnswerPairs) -> Tensor:
    """Return KL(q ‖ p), [pairs], with q = (σ(β·h), σ(−β·h)) and p = (1 − λ, λ) (EXO, Ji et al. 2024)."""
    scaled = dpo.beta * pairs.margin
    chosen = torch.sigmoid(scaled) * (logsigmoid(scaled) - math.log1p(-dpo.label_smoothing))
    return chosen + torch.sigmoid(-scaled) * (logsigmoid(-scaled) - math.log(dpo.label_smoothing))


def discopop(dpo: DpoConfig, pairs: AnswerPairs) -> Tensor:
    """Return −(1 − m) · log σ(β·h) + m · exp(−β·h), [pairs], with m = σ(β·h / τ) (DiscoPOP, Lu et al. 2024)."""
    scaled = dpo.beta * pairs.margin
    share = torch.sigmoid(scaled / dpo.discopop_tau)
    return -(1 - share) * logsigmoid(scaled) + share * (-scaled).exp()


def smoothed(dpo: DpoConfig, margin: Tensor) -> Tensor:
    """Return −(1 − λ) · log σ(β·h) − λ · log σ(−β·h) of margins h."""
    smoothing = dpo.label_smoothing
    return -(1 - smoothing) * logsigmoid(dpo.beta * margin) - smoothing * logsigmoid(-dpo.beta * margin)
