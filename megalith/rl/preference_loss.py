"""Direct preference optimization (Rafailov et al. 2023): of two answers to a prompt, make the chosen one likelier.

    ℓ = −(1 − λ) · log σ(β · h) − λ · log σ(−β · h)       h = Σ_chosen (log π − log π_ref) − Σ_rejected (the same)

λ is the label smoothing, the fraction of pairs whose choice is assumed to be wrong. The loss of a step is the mean over
its pairs. The other losses use another function of h, or means over the tokens (docs/preference.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megalith.config.rl import DpoConfig
from megalith.data.batch import Batch
from megalith.rl.objective import Sequences
from megalith.rl.summed_loss import SummedLoss


@dataclass
class PreferenceBatch(Batch):
    """Sequences 2k and 2k + 1 are a pair, the chosen one first; `loss_mask` is 1 where the label is the answer's."""

    numbers: Tensor  # int64 [batch, seq], of the token's sequence within the micro-batch
    sequence_tokens: Tensor  # float32 [sequences], the answer's tokens of each; 0 of what fills up
    reference_logprobs: Tensor | None = None  # float32 [batch, seq]


class PreferenceLoss(SummedLoss):
    """The step's loss by a section `dpo`, for `ParallelModel.backward` with micro-batches of PreferenceBatch."""

    FIGURES = (
        "pairs",
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "rewards/margins",
        "logps/chosen",
        "logps/rejected",
    )

    def __init__(self, dpo: DpoConfig):
        self.dpo = dpo

    def denominator(self, batch: PreferenceBatch) -> Tensor:
        return (batch.sequence_tokens[::2] > 0).sum().double()

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: PreferenceBatch) -> Tensor:
        sequences = Sequences.of(batch)
        logps = sequences.sums(logprobs)  # [sequences]
        gaps = sequences.sums(logprobs - batch.reference_logprobs)
        there = batch.sequence_tokens[::2] > 0  # [pairs]
        rewards = (self.dpo.beta * gaps.detach()).unflatten(0, (-1, 2)).T  # [2, pairs]
        margins = rewards[0] - rewards[1]
        self.add_figures([there, *rewards, margins > 0, margins, *logps.detach().unflatten(0, (-1, 2)).T])
        return torch.where(there, preference_losses(self.dpo, gaps, sequences.tokens), 0.0).sum()


def preference_losses(dpo: DpoConfig, gaps: Tensor, tokens: Tensor) -> Tensor:
    """Of each pair, float32 [pairs], from Σ (log π − log π_ref) of each sequence and its tokens, [sequences]."""
    if dpo.loss_type in ("ipo", "sigmoid_norm"):
        gaps = gaps / tokens.clamp(min=1)
    margin = gaps[::2] - gaps[1::2]
    right, wrong, smoothing = (
        logsigmoid(dpo.beta * margin),
        logsigmoid(-dpo.beta * margin),
        dpo.label_smoothing,
    )
    match dpo.loss_type:
        case "hinge":
            return torch.relu(1 - dpo.beta * margin)
        case "ipo":
            return (margin - 1 / (2 * dpo.beta)).square()
        case "robust":
            return (smoothing * wrong - (1 - smoothing) * right) / (1 - 2 * smoothing)
        case "sigmoid_norm":
            return -right
        case _:
            return -(1 - smoothing) * right - smoothing * wrong
