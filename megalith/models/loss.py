"""What a backward pass makes the gradient of: a function of the log-probabilities of given tokens.

A loss is written as for one device. In every layout it gets whole micro-batches: log-probabilities [batch, seq] of
whole sequences, though tensor parallelism shards the vocabulary, context parallelism the sequences, and the last
pipeline stage alone has them. No rank ever holds whole logits.

    class Policy(Loss):                                      # REINFORCE, averaged over the tokens of the step
        def __call__(self, logprobs, entropy, batch):
            return -(batch.advantages[:, None] * logprobs * batch.loss_mask).sum()

The loss of a step is Σ of these over all micro-batches of all data-parallel ranks / Σ of their `denominator`. To that
the model adds losses of its own: the balance of experts, and multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalith.ops.cross_entropy import (
    TokenLoss,
    linear_cross_entropy,
    linear_logits,
    linear_logprobs,
    linear_token_losses,
)

if TYPE_CHECKING:
    from megalith.data.batch import Batch
    from megalith.models.pass_context import Context


FusedHeadLoss = Callable[..., tuple[Tensor, Tensor | None, Tensor]]
"""(hidden [..., hidden], weight [rows here, hidden], labels [...], tokens, vocab_size, softcap, scale, **shard) → what
`observe` sees, twice float32 [...] or None, and the sum of losses, its gradient times scale. As `compute_logprobs`."""


class Loss:
    """A loss of a step. Subclasses give `__call__`, or `weights` where it is linear, and change what else they need.

    Every method gets a whole micro-batch of a data-parallel rank. What else than tokens a loss reads (advantages, the
    log-probabilities of a reference) are fields of the Batch's subclass that the caller passes.
    """

    temperature: float = 1.0
    """The log-probabilities are those of logits / temperature."""
    needs_entropy: bool = False
    vocab_size: int | None = None
    """And over the first so many entries of the vocabulary; None: all that the model has."""

    def denominator(self, batch: Batch) -> Tensor | float:
        """What the micro-batch adds to the step's divisor: a scalar, known before any pass. Here its valid tokens.

        Where the step's is 0 it counts as 1.
        """
        return batch.loss_mask.sum(dtype=torch.float64)

    def logged_weight(self, batch: Batch) -> float | None:
        """Return the micro-batch's weight in the logged loss, or None if the log has the step's own loss.

        The logged loss is then Σ weight · loss / Σ weight over the micro-batches of the step.
        """
        return None

    def targets(self, batch: Batch) -> Tensor:
        """The tokens whose log-probabilities are asked for: int64 [batch, seq], or [batch, seq, k] for k candidates
        each, as distillation from a teacher's likeliest tokens has them."""
        return batch.labels

    def weights(self, batch: Batch) -> Tensor | None:
        """float32 w [batch, seq], of any sign, where the loss is −Σ w · log-probability; None: it is not linear.

        A linear loss takes one pass over the output matrix where one of several tokens at once takes two; `__call__` is
        not called, unless the temperature is not 1, it needs the entropy, or has a `vocab_size`.
        """
        return None

    def tokens(self, batch: Batch) -> dict[str, Tensor] | None:
        """What `token_losses` reads, [batch, seq] each, where the loss is a sum over tokens; None: it is not.

        Such a loss takes one pass too; in the place of `__call__` come `token_losses` and `observe`. `batch` is on the
        model's device.
        """
        return None

    def token_losses(self, logprobs: Tensor, entropy: Tensor | None, tokens: Mapping[str, Tensor]) -> Tensor:
        """Each token's loss, float32 of the shape of the arguments: any of the micro-batch's tokens, in any order.

        A token's depends on its own entries alone.
        """
        raise NotImplementedError(f"{type(self).__name__} has tokens but no token_losses")

    def observe(self, logprobs: Tensor, entropy: Tensor | None, batch: Batch) -> None:
        """Sees what `token_losses` was given, of the whole micro-batch and without a gradient: for figures."""

    def fused_head_loss(self, batch: Batch) -> FusedHeadLoss | None:
        """What is made of the output matrix's own input, for a loss that the log-probabilities of given tokens are not
        enough for; None: they are. It takes `tokens`, and gives `observe` something in the place of these."""
        return None

    def given(self, batch: Batch, weights: Tensor) -> Batch:
        """The batch as the model gets it: with `targets` for its labels, and these weights for its loss_mask."""
        return replace(batch, labels=self.targets(batch), loss_mask=weights)

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: Batch) -> Tensor:
        """The micro-batch's sum, a float32 scalar with a gradient.

        `logprobs`: float32, as `targets`, with a gradient. `entropy`: float32 [batch, seq], that of each token's
        distribution, with a gradient; None unless `needs_entropy`. `batch` is on their device.
        """
        weights = self.weights(batch)
        if weights is None:
            raise NotImplementedError(f"{type(self).__name__} has neither __call__ nor weights")
        return -(weights * logprobs).sum()


class CrossEntropy(Loss):
    """Pre-training's: the mean of −log-probability over the valid tokens of the step."""

    def weights(self, batch: Batch) -> Tensor:
        return batch.loss_mask


class MicroBatchMean(CrossEntropy):
    """The mean over the step's micro-batches of each one's mean: Megatron-LM's without calculate_per_token_loss.

    The log has the mean over all valid tokens of the step, as Megatron-LM's does.
    """

    def denominator(self, batch: Batch) -> float:
        return 1.0

    def logged_weight(self, batch: Batch) -> float | None:
        return float(batch.loss_mask.sum(dtype=torch.float64))

    def weights(self, batch: Batch) -> Tensor:
        return batch.loss_mask / batch.loss_mask.sum().clamp(min=1)


@dataclass
class Objective:
    """A loss with its micro-batch, as a pass through the model takes it."""

    of: Callable[[Tensor, Tensor | None], Tensor | None]
    """(logprobs, entropy) of this rank's tokens -> float32 scalar; None where there are `tokens`: it makes figures."""
    temperature: float = 1.0
    needs_entropy: bool = False
    vocab_size: int | None = None
    token_losses: TokenLoss | None = None
    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    """This rank's, as its labels, of a loss that is a sum over tokens."""
    fused_head_loss: FusedHeadLoss | None = None
    """What is asked in the place of all the others."""

    def loss(
        self, logprobs: Tensor, entropy: Tensor | None, loss: Tensor | None, scale: Tensor | None
    ) -> Tensor:
        """The float32 scalar, from what a pass over the output matrix found; `loss` is the sum of `token_losses`, with
        its gradient times `scale`."""
        if loss is None:
            return scale_gradient(self.of(logprobs, entropy), scale)
        self.of(logprobs, entropy)
        return loss


def compute_logprobs(
    objective: Objective,
    hidden: Tensor,  # [..., hidden]
    weight: Tensor,  # [padded vocab or this rank's rows, hidden]
    targets: Tensor,  # int64 [...] or [..., k]
    tokens: Mapping[str, Tensor],  # those of the objective, as the targets stand here
    vocab_size: int,
    softcap: float | None,
    scale: Tensor | None,
    **shard,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What an objective asks of the output matrix: log-probabilities, entropies, and a sum of losses if it is one."""
    asked = dict(temperature=objective.temperature, entropy=objective.needs_entropy, **shard)
    sizes = (min(vocab_size, objective.vocab_size or vocab_size), softcap)
    if objective.fused_head_loss is not None:
        return objective.fused_head_loss(hidden, weight, targets, tokens, *sizes, scale, **shard)
    if objective.token_losses is None:
        return *linear_logprobs(hidden, weight, targets, *sizes, **asked), None
    of = objective.token_losses
    loss, *found = linear_token_losses(hidden, weight, targets, of, tokens, *sizes, scale, **asked)
    return *found, loss


def scale_gradient(loss: Tensor, scale: Tensor | None) -> Tensor:
    """`loss` as it is, with `scale` times its gradient: float32 scalars."""
    return loss if scale is None else _ScaledGradient.apply(loss, scale)


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return loss.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad * ctx.saved_tensors[0], None


def cross_entropy_sum(
    x: Tensor,  # [batch, seq, hidden]
    weight: Tensor,  # [padded vocab, hidden]
    labels: Tensor,  # int64 [batch, seq]
    loss_mask: Tensor,  # float32 [batch, seq]
    vocab_size: int,
    softcap: float | None,
    context: Context,
    scale: Tensor | None = None,  # float32 scalar: of the gradient; None: 1
    *,
    bias: Tensor | None = None,  # float32 [padded vocab], added to the logits
) -> Tensor:
    of_tokens = labels, loss_mask, vocab_size, softcap, scale
    return linear_cross_entropy(x, weight, *of_tokens, bias=bias, max_label_tokens=context.max_label_tokens)


def target_logprobs(
    x: Tensor,  # [batch, seq, hidden]
    weight: Tensor,  # [padded vocab, hidden]
    targets: Tensor,  # int64 [batch, seq] or [batch, seq, k]
    vocab_size: int,
    softcap: float | None,
    context: Context,
    objective: Objective,
    scale: Tensor | None = None,  # float32 scalar: of the gradient of its losses; None: 1
    *,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    tokens = objective.tokens
    return compute_logprobs(objective, x, weight, targets, tokens, vocab_size, softcap, scale, bias=bias)


def all_logits(
    x: Tensor,
    weight: Tensor,
    vocab_size: int,
    softcap: float | None,
    context: Context,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    return linear_logits(x, weight[:vocab_size], softcap, None if bias is None else bias[:vocab_size])
