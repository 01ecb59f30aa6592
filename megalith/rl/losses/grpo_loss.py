"""The interface of GRPO losses, with PPO's clip and the mean over tokens as defaults."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from megalith.config.extensions import LOSSES
from megalith.config.load_extension import load_extension
from megalith.config.rl import RlConfig
from megalith.errors import ConfigError
from megalith.rl.objectives.sequences import Sequences


class GrpoLoss:
    """The policy term of each token's loss, and the aggregation of all terms over tokens.

    The loss of a step is Σ weight · loss over its tokens / Σ divisor over its micro-batches. `PolicyLoss` adds the
    terms that all losses share: mismatch weight, KL and entropy.
    """

    weighs_policy = False
    """The mismatch weight compares the trained policy, instead of the old policy, with the one that sampled the
    rollout.
    """

    def token_losses(self, rl: RlConfig, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """Return the policy term of each token's loss, [batch, seq]: PPO's clipped ratio.

        Args:
            rl: section `rl` of the configuration.
            ratio: π / π_old with its gradient, float [batch, seq].
            logprobs: log π with its gradient, float [batch, seq].
            advantages: float [batch, seq].
        """
        clipped = ratio.clamp(1 - rl.epsilon, 1 + rl.upper_epsilon)
        unclipped = ratio if rl.delta is None else ratio.clamp(max=rl.delta)
        losses = -torch.min(unclipped * advantages, clipped * advantages)
        if rl.clip_ratio_c is not None:
            bound = -rl.clip_ratio_c * advantages
            losses = torch.where(advantages < 0, torch.min(losses, bound), losses)
        return losses

    def clip_bounds(self, rl: RlConfig) -> tuple[float, float]:
        """Return the ratio bounds beyond which the metrics clip_low and clip_high count a token."""
        return 1 - rl.epsilon, 1 + rl.upper_epsilon

    def token_weights(self, rl: RlConfig, sequences: Sequences, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight of each token's loss in the numerator, [batch, seq]; 0 outside the loss."""
        return sequences.mask.to(dtype)

    def divisor(self, rl: RlConfig, sequence_tokens: Tensor) -> Tensor:
        """Return a micro-batch's term of the denominator, a float64 scalar: its number of tokens in the loss.

        Args:
            rl: section `rl` of the configuration.
            sequence_tokens: float [sequences], number of tokens in the loss.
        """
        return sequence_tokens.sum(dtype=torch.float64)


class _FunctionLoss(GrpoLoss):
    """A user-defined function as `token_losses`, averaged over tokens."""

    def __init__(self, function: Callable[..., Tensor]):
        self.token_losses = function


def count_sequences(rl: RlConfig, sequence_tokens: Tensor) -> Tensor:
    """Return the number of sequences, float64.

    Sequences without a token in the loss count only with rl.count_masked_sequences.
    """
    counted = torch.ones_like(sequence_tokens) if rl.counts_masked_sequences else sequence_tokens > 0
    return counted.sum(dtype=torch.float64)


@functools.cache
def load_loss(loss_type: str) -> GrpoLoss:
    """Return the loss that `loss_type` names: a built-in one, or `path.py:NAME` of a subclass or a function.

    Raises:
        ConfigError: if the loss does not exist, or is a class that does not derive from GrpoLoss.
    """
    loss = load_extension(loss_type, LOSSES, "rl.loss_type")
    if not isinstance(loss, type):
        return _FunctionLoss(loss)
    if not issubclass(loss, GrpoLoss):
        raise ConfigError(
            f"rl.loss_type is {loss_type!r}, a class that does not derive from "
            "megalith.rl.GrpoLoss; make it a subclass, or write a function of rl, ratio, logprobs "
            "and advantages"
        )
    return loss()
