"""Losses of reward models, functions of the scores of answers or of steps (docs/reward_models.md).

The model gives a score per token, in place of log-probabilities. `loss_mask` is 1 at the tokens whose scores count: the
last token of each answer, or of each step's separator.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from megalith.config.preferences import RewardConfig
from megalith.rl.objectives.answer_batch import AnswerBatch
from megalith.rl.objectives.sequences import Sequences
from megalith.rl.objectives.summed_loss import SummedLoss


class PairwiseRewardLoss(SummedLoss):
    """Mean over pairs of −log σ(s_chosen − s_rejected − margin) (Bradley and Terry; margin: Touvron et al. 2023).

    ordinal: −z · log σ(d) − (1 − z) · log σ(−d), with d = s_chosen − s_rejected and the pair's preference z (Liu et al.
    2024, Reward Modeling with Ordinal Feedback).
    """

    METRICS = ("pairs", "accuracy", "margin", "mean_reward")

    def __init__(self, reward: RewardConfig):
        self.center, self.is_ordinal = reward.center_rewards_coefficient, reward.loss_type == "ordinal"

    def denominator(self, batch: AnswerBatch) -> Tensor:
        return (batch.sequence_tokens[::2] > 0).sum().double()

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: AnswerBatch) -> Tensor:
        """Return the sum of the pairs' losses; `logprobs` are scores, float32 [batch, seq]."""
        sequences = Sequences.from_batch(batch)
        scores = sequences.sums(logprobs).unflatten(0, (-1, 2))  # [pairs, 2]
        present = batch.sequence_tokens[::2] > 0  # [pairs]
        margins = scores[:, 0] - scores[:, 1]
        values = None if batch.values is None else sequences.sums(batch.values)[::2]
        if values is None:
            losses = -logsigmoid(margins)
        elif self.is_ordinal:
            losses = -values * logsigmoid(margins) - (1 - values) * logsigmoid(-margins)
        else:
            losses = -logsigmoid(margins - values)
        if self.center is not None:
            losses = losses + self.center * scores.sum(1).square()
        detached = margins.detach()
        correct = (detached > 0) & present
        self.add_metrics([present, correct, detached * present, scores.detach().mean(1) * present])
        return torch.where(present, losses, 0.0).sum()


class LabelledRewardLoss(SummedLoss):
    """Mean over labels of (s − label)², or of the cross-entropy of σ(s) with the label."""

    METRICS = ("labels", "accuracy", "mean_reward", "mean_label")

    def __init__(self, reward: RewardConfig):
        self.is_binary = reward.loss_type == "bce"

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: AnswerBatch) -> Tensor:
        """Return the sum of the labels' losses; `logprobs` are scores, float32 [batch, seq]."""
        counted = batch.loss_mask > 0
        scores, labels = logprobs[counted], batch.values[counted]
        if self.is_binary:
            losses = binary_cross_entropy_with_logits(scores, labels, reduction="none")
            correct = (scores.detach() > 0) == (labels > 0.5)
        else:
            losses = (scores - labels).square()
            correct = (scores.detach() - labels).abs() < 0.5
        self.add_metrics([counted, correct, scores.detach(), labels])
        return losses.sum()


def reward_loss(reward: RewardConfig) -> SummedLoss:
    """Return the loss that section `reward` selects."""
    return PairwiseRewardLoss(reward) if reward.compares_pairs else LabelledRewardLoss(reward)
