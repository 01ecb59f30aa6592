"""The interface of losses in which a token's term depends on all tokens of its sequence."""

from __future__ import annotations

from torch import Tensor

from megalith.config.rl import RlConfig
from megalith.rl.losses.grpo_loss import GrpoLoss
from megalith.rl.objectives.sequences import Sequences


class SequenceLoss(GrpoLoss):
    """A loss with `sequence_losses` instead of `token_losses`. It computes the logits twice."""

    def sequence_losses(
        self,
        rl: RlConfig,
        log_ratio: Tensor,
        logprobs: Tensor,
        advantages: Tensor,
        mismatch: Tensor | None,
        sequences: Sequences,
    ) -> Tensor:
        """Return the policy term of each token's loss including its mismatch weight, [batch, seq].

        Args:
            rl: section `rl` of the configuration.
            log_ratio: log π − log π_old with its gradient, float [batch, seq], 0 outside the loss.
            logprobs: log π with its gradient, float [batch, seq].
            advantages: float [batch, seq].
            mismatch: bounded weights exp(log π_old − log π_rollout), float [batch, seq]; None means 1.
            sequences: the tokens' sequences.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement sequence_losses")
