"""Direct preference optimization (Rafailov et al. 2023): of two answers to a prompt the chosen one becomes likelier.

    ℓ = −(1 − λ) · log σ(β · h) − λ · log σ(−β · h)       h = Σ_chosen (log π − log π_ref) − Σ_rejected (the same)

λ is the label smoothing: how often the choice is wrong. The step's loss is the mean over the pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megalith.data.batch import Batch
from megalith.models.loss import Loss


@dataclass
class PreferenceBatch(Batch):
    """Neighbouring rows are a pair, the chosen one first; `loss_mask` is 1 where the label is the answer's."""

    reference_logprobs: Tensor | None = None  # float32 [batch, seq]


class SigmoidPreference(Loss):
    """DPO's loss, for `ParallelModel.backward` with micro-batches of PreferenceBatch."""

    def __init__(self, beta: float = 0.1, label_smoothing: float = 0.0):
        self.beta, self.label_smoothing = beta, label_smoothing

    def denominator(self, batch: PreferenceBatch) -> float:
        return len(batch.input_ids) // 2

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: PreferenceBatch) -> Tensor:
        gaps = torch.where(batch.loss_mask > 0, logprobs - batch.reference_logprobs, 0.0).sum(1)  # [batch]
        return preference_losses(gaps[::2], gaps[1::2], self.beta, self.label_smoothing).sum()


def preference_losses(chosen: Tensor, rejected: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Of each pair, from Σ (log π − log π_ref) of both: [pairs] → [pairs]."""
    margin = beta * (chosen - rejected)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
