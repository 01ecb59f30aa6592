"""Losses of direct preference optimization (DPO, Rafailov et al. 2023).

    ℓ = −(1 − λ) · log σ(β · h) − λ · log σ(−β · h)       h = Σ_chosen (log π − log π_ref) − Σ_rejected (the same)

λ is the label smoothing: the fraction of pairs whose preference is assumed to be wrong. The loss of a step is the mean
over its pairs. The other losses apply another function to h, or use means over tokens (docs/preference.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megalith.config.rl import DpoConfig
from megalith.data.batch import Batch
from megalith.rl.sequences import Sequences
from megalith.rl.summed_loss import SummedLoss


@dataclass
class PreferenceBatch(Batch):
    """A micro-batch of pairs: sequences 2k (chosen) and 2k + 1 (rejected). `loss_mask` is 1 where the label is in the
    answer."""

    sequence_ids: Tensor  # int64 [batch, seq], the token's sequence within the micro-batch
    sequence_tokens: Tensor  # float32 [sequences], tokens of the answer; 0 for padding
    reference_logprobs: Tensor | None = None  # float32 [batch, seq]


class PreferenceLoss(SummedLoss):
    """Loss of a step with the settings of section `dpo`, for `ParallelModel.backward` on micro-batches of
    PreferenceBatch."""

    METRICS = (
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
        sequences = Sequences.from_batch(batch)
        logps = sequences.sums(logprobs)  # [sequences]
        log_ratios = sequences.sums(logprobs - batch.reference_logprobs)
        present = batch.sequence_tokens[::2] > 0  # [pairs]
        rewards = (self.dpo.beta * log_ratios.detach()).unflatten(0, (-1, 2)).T  # [2, pairs]
        margins = rewards[0] - rewards[1]
        self.add_metrics([present, *rewards, margins > 0, margins, *logps.detach().unflatten(0, (-1, 2)).T])
        return torch.where(present, preference_losses(self.dpo, log_ratios, sequences.tokens), 0.0).sum()


def preference_losses(dpo: DpoConfig, log_ratios: Tensor, tokens: Tensor) -> Tensor:
    """Return the loss of each pair, float32 [pairs].

    Args:
        dpo: section `dpo` of the configuration.
        log_ratios: Σ (log π − log π_ref) of each sequence, float32 [sequences].
        tokens: number of answer tokens of each sequence, float32 [sequences].
    """
    if dpo.loss_type in ("ipo", "sigmoid_norm"):
        log_ratios = log_ratios / tokens.clamp(min=1)
    margin = log_ratios[::2] - log_ratios[1::2]
    chosen, rejected, smoothing = (
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
            return (smoothing * rejected - (1 - smoothing) * chosen) / (1 - 2 * smoothing)
        case "sigmoid_norm":
            return -chosen
        case _:
            return -(1 - smoothing) * chosen - smoothing * rejected
