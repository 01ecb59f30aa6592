"""Alignment via optimal transport (AOT, Melnyk et al. 2024): losses that compare the pairs of a step by rank.

Both compare two sorted lists: aot compares the policy's margins with the reference's, and aot_unpaired the log ratios
of chosen answers with the log ratios of rejected answers. The formulas are from TRL's DPOTrainer, which sorts each
micro-batch. Here the lists cover the whole step, so the loss does not depend on the layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.config.preferences import DpoConfig
from megalith.rl.preference_losses.answer_pairs import AnswerPairs
from megalith.rl.preference_losses.margin_losses import smoothed


def aot(dpo: DpoConfig, pairs: AnswerPairs) -> Tensor:
    """Return −(1 − λ) · log σ(β·d) − λ · log σ(−β·d), [pairs].

    d is the pair's log π(chosen) − log π(rejected), minus the reference's difference that has the same rank in the
    step.
    """
    return smoothed(dpo, pairs.chosen_logps - pairs.rejected_logps - pairs.partners[0])


def aot_unpaired(dpo: DpoConfig, pairs: AnswerPairs) -> Tensor:
    """Return the function of `aot` with d = chosen log ratio minus the rejected log ratio of the same rank, [pairs].

    The term of a rank is counted in the pair of its chosen answer. The pair of its rejected answer gets a term with the
    value 0, which carries the gradient of the rejected answer.
    """
    rejected = smoothed(dpo, pairs.partners[2] - pairs.rejected_ratios)
    return smoothed(dpo, pairs.chosen_ratios - pairs.partners[1]) + rejected - rejected.detach()


def match_ranks(chosen: Tensor, rejected: Tensor, reference_margins: Tensor, margins: Tensor) -> Tensor:
    """Return `AnswerPairs.partners` of all pairs of a step, [3, pairs]. Equal values are ranked in the order of the
    pairs.

    Args:
        chosen: log ratios of the chosen answers, [pairs].
        rejected: log ratios of the rejected answers, [pairs].
        reference_margins: differences of the reference's log-probabilities, [pairs].
        margins: differences of the policy's log-probabilities, [pairs].
    """
    matched = ((margins, reference_margins), (chosen, rejected), (rejected, chosen))
    return torch.stack([_values_at_ranks_of(keys, values) for keys, values in matched])


def _values_at_ranks_of(keys: Tensor, values: Tensor) -> Tensor:
    """Return, for each key, the element of `values` whose rank equals the key's rank."""
    order = torch.sort(keys, stable=True).indices
    return torch.empty_like(values).index_copy(0, order, torch.sort(values, stable=True).values)
