"""Preference losses that sum a term per answer, so that they can raise one answer and lower the other.

c and r are the log ratios of the chosen and the rejected answer. Names and formulas are from TRL's DPOTrainer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megalith.config.preferences import DpoConfig
from megalith.rl.preference_losses.answer_pairs import AnswerPairs


def nca_pair(dpo: DpoConfig, pairs: AnswerPairs) -> Tensor:
    """Return −log σ(β·c) − ½ log σ(−β·c) − ½ log σ(−β·r), [pairs] (NCA, Chen et al. 2024)."""
    chosen, rejected = dpo.beta * pairs.chosen_ratios, dpo.beta * pairs.rejected_ratios
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def bco_pair(dpo: DpoConfig, pairs: AnswerPairs) -> Tensor:
    """Return −log σ(β·c) − log σ(−β·r), [pairs] (BCO, Jung et al. 2024), without the shift of the rewards."""
    return -logsigmoid(dpo.beta * pairs.chosen_ratios) - logsigmoid(-dpo.beta * pairs.rejected_ratios)


def sppo_hard(dpo: DpoConfig, pairs: AnswerPairs) -> Tensor:
    """Return (c − 1 / 2β)² + (r + 1 / 2β)², [pairs] (SPPO, Wu et al. 2024, with probabilities of 1 and 0)."""
    target = 0.5 / dpo.beta
    return (pairs.chosen_ratios - target).square() + (pairs.rejected_ratios + target).square()


def apo_zero(dpo: DpoConfig, pairs: AnswerPairs) -> Tensor:
    """Return 1 − σ(β·c) + σ(β·r), [pairs] (APO, D'Oosterlinck et al. 2024). It raises c and lowers r."""
    return 1 - torch.sigmoid(dpo.beta * pairs.chosen_ratios) + torch.sigmoid(dpo.beta * pairs.rejected_ratios)


def apo_down(dpo: DpoConfig, pairs: AnswerPairs) -> Tensor:
    """Return σ(β·c) + 1 − σ(β·(c − r)), [pairs] (APO). It lowers both log ratios, the rejected answer's more."""
    return torch.sigmoid(dpo.beta * pairs.chosen_ratios) + 1 - torch.sigmoid(dpo.beta * pairs.margin)
