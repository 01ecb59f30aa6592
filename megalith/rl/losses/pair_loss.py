"""Online DPO (Guo et al. 2024): preferences between the two completions of a prompt, by their rewards.

u is the sum of log π − log π_ref over a completion's tokens, and h is u of the completion with the larger reward minus
u of the other one. The loss of a pair is a function of h, as with `dpo.loss_type` sigmoid or ipo. A micro-batch may
contain only one completion of a pair. Each completion therefore has its own term and gradient. In this term, u of the
other completion is a constant that was computed before the step (online_pairs.py). The formulas are from TRL's
OnlineDPOTrainer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megalith.config.rl import RlConfig
from megalith.rl.losses.grpo_loss import GrpoLoss
from megalith.rl.objectives.sequences import Sequences


class PairLoss(GrpoLoss):
    """A loss of completion pairs, averaged over the pairs. It computes the logits twice."""

    def losses_of_margins(self, rl: RlConfig, margins: Tensor) -> Tensor:
        """Return the losses of pairs with these margins h, of any shape."""
        raise NotImplementedError(f"{type(self).__name__} does not implement losses_of_margins")

    def pair_losses(
        self,
        rl: RlConfig,
        logprobs: Tensor,
        reference: Tensor,
        signs: Tensor,
        partners: Tensor,
        sequences: Sequences,
    ) -> Tensor:
        """Return each sequence's share of its pair's loss, divided equally among its tokens in the loss, [batch,
        seq].

        The preferred completion's term has the value of the pair's loss. The other completion's term has the value 0,
        but its own gradient.

        Args:
            rl: section `rl` of the configuration.
            logprobs: log π with its gradient, float [batch, seq].
            reference: log π_ref, float [batch, seq].
            signs: 1 for the preferred completion of a pair, −1 for the other, float [batch, seq].
            partners: u of the other completion, float [batch, seq].
            sequences: the tokens' sequences.
        """
        ratios = sequences.sums(logprobs - reference)
        signs, partners = sequences.means(signs).round(), sequences.means(partners)
        losses = self.losses_of_margins(rl, signs * (ratios - partners))
        losses = torch.where(signs > 0, losses, losses - losses.detach())
        return sequences.per_token(losses / sequences.tokens.clamp(min=1))

    def divisor(self, rl: RlConfig, sequence_tokens: Tensor) -> Tensor:
        """Return the number of pairs: half of the sequences with tokens in the loss."""
        return (sequence_tokens > 0).sum(dtype=torch.float64) / 2

    def clip_bounds(self, rl: RlConfig) -> tuple[float, float]:
        return 0.0, math.inf


class OnlineDpo(PairLoss):
    """Loss of a pair: −log σ(rl.beta · h), with the margin h."""

    def losses_of_margins(self, rl: RlConfig, margins: Tensor) -> Tensor:
        return -logsigmoid(rl.beta * margins)


class OnlineIpo(PairLoss):
    """Loss of a pair: (h − 1 / (2 · rl.beta))², with the margin h."""

    def losses_of_margins(self, rl: RlConfig, margins: Tensor) -> Tensor:
        return (margins - 1 / (2 * rl.beta)).square()
