"""The interface of losses that select a few of a step's tokens and treat them differently."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megalith.config.rl import RlConfig
from megalith.rl.losses.grpo_loss import GrpoLoss


@dataclass(frozen=True)
class StepTokens:
    """The loss tokens of a step, in an order that does not depend on the layout: float64 [tokens] per field."""

    logprobs: Tensor  # of the policy before the step
    old_logprobs: Tensor
    advantages: Tensor
    entropies: Tensor
    seed: int
    """Seed of random choices in this step."""

    @property
    def covariances(self) -> Tensor:
        """Return (A − mean of A) · (log π − mean of log π) of each token. The means are over the step."""
        return (self.advantages - self.advantages.mean()) * (self.logprobs - self.logprobs.mean())


class SelectiveLoss(GrpoLoss):
    """A loss with a different term for selected tokens.

    Before each step a forward pass computes the log-probabilities that `select` needs.
    """

    def select(self, rl: RlConfig, tokens: StepTokens) -> Tensor:
        """Return the indices of the selected tokens, int64 [selected]."""
        raise NotImplementedError(f"{type(self).__name__} does not implement select")

    def selected_losses(self, rl: RlConfig, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """Return the policy term of each token if it is selected, [batch, seq]. See `token_losses` for the
        arguments.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement selected_losses")


def selected_count(fraction: float, tokens: Tensor) -> int:
    """Return `fraction` of the number of tokens, rounded down, but at least 1."""
    return min(max(1, int(fraction * len(tokens))), len(tokens))
