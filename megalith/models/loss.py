"""Losses, as functions of token log-probabilities.

A loss is written for one device. In every layout it gets full micro-batches, log-probabilities [batch, seq] of full
sequences, although tensor parallelism shards the vocabulary and context parallelism the sequences, and only the last
pipeline stage computes them. No rank materializes the logits of the full vocabulary.

    class Policy(Loss):                                      # REINFORCE, averaged over the tokens of the step
        def __call__(self, logprobs, entropy, batch):
            return -(batch.advantages[:, None] * logprobs * batch.loss_mask).sum()

The loss of a step is the sum over all micro-batches of all data-parallel ranks, divided by the sum of their
`denominator`s. The model adds its own losses: expert balancing and multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalith.ops.cross_entropy import TokenLoss, linear_cross_entropy, linear_token_losses
from megalith.ops.linear_logprobs import linear_logprobs
from megalith.ops.vocab_softmax import ORDINARY, HeadMath, linear_logits

if TYPE_CHECKING:
    from megalith.data.batch import Batch
    from megalith.models.pass_context import Context


FusedHeadLoss = Callable[..., tuple[Tensor, Tensor | None, Tensor]]
"""Function (hidden [..., hidden], weight [local rows, hidden], labels [...], tokens, vocab_size, softcap, scale,
**shard) → the log-probabilities and entropies for `observe`, float32 [...] or None, and the sum of losses, whose
gradient is multiplied by scale."""


class Loss:
    """Base class of losses. A subclass defines `__call__`, or `weights` if the loss is linear in the log-probabilities.

    Every method gets a full micro-batch of a data-parallel rank. Further inputs, such as advantages or a reference's
    log-probabilities, are fields of the caller's subclass of Batch.
    """

    temperature: float = 1.0
    """Log-probabilities are computed from logits / temperature."""
    needs_entropy: bool = False
    """True if the loss reads the entropy of each token's distribution."""
    vocab_size: int | None = None
    """Number of vocabulary entries, from the first on, that log-probabilities are normalized over; None: all."""

    def denominator(self, batch: Batch) -> Tensor | float:
        """Return the micro-batch's term of the step's divisor, a scalar. The default is its number of valid tokens.

        This method is called before any pass of the step. If the divisor of the step is 0, it is replaced by 1.
        """
        return batch.loss_mask.sum(dtype=torch.float64)

    def logged_weight(self, batch: Batch) -> float | None:
        """Return the micro-batch's weight in the logged loss, or None to log the optimized loss.

        With weights, the logged loss is Σ weight · loss / Σ weight over the micro-batches of the step.
        """
        return None

    def targets(self, batch: Batch) -> Tensor:
        """Return the tokens whose log-probabilities are computed, int64 [batch, seq] or [batch, seq, k].

        [batch, seq, k] is for k candidates per token, as in distillation from a teacher's top k.
        """
        return batch.labels

    def weights(self, batch: Batch) -> Tensor | None:
        """Return float32 w [batch, seq], of any sign, if the loss is −Σ w · log-probability; None if it is not linear.

        A linear loss takes one pass over the output matrix instead of two. `__call__` is then only called if the
        temperature is not 1, or if the loss needs the entropy or has a `vocab_size`.
        """
        return None

    def tokens(self, batch: Batch) -> dict[str, Tensor] | None:
        """Return the inputs of `token_losses`, tensors [batch, seq] by name, if the loss is a sum over tokens, else
        None.

        Such a loss also takes one pass over the output matrix, and `token_losses` and `observe` are called instead of
        `__call__`. `batch` is on the model's device.
        """
        return None

    def token_losses(self, logprobs: Tensor, entropy: Tensor | None, tokens: Mapping[str, Tensor]) -> Tensor:
        """Return each token's loss, float32 of the arguments' shape.

        The arguments hold some of the micro-batch's tokens, in any order; a token's loss must depend only on its own
        entries.
        """
        raise NotImplementedError(f"{type(self).__name__} defines tokens but not token_losses; define both")

    def observe(self, logprobs: Tensor, entropy: Tensor | None, batch: Batch) -> None:
        """Receive the full micro-batch's log-probabilities and entropies, without gradient, for metrics."""

    def fused_head_loss(self, batch: Batch) -> FusedHeadLoss | None:
        """Return a function that computes the loss from the output matrix's input, or None.

        Define it for a loss that needs more than the log-probabilities of `targets`. The function gets the result of
        `tokens`, and its first two outputs go to `observe`.
        """
        return None

    def with_weights(self, batch: Batch, weights: Tensor) -> Batch:
        """Return the batch that the model gets, with `targets` as labels and these weights as loss_mask."""
        return replace(batch, labels=self.targets(batch), loss_mask=weights)

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: Batch) -> Tensor:
        """Return the sum of the micro-batch's losses, a float32 scalar with a gradient.

        Args:
            logprobs: float32, log-probabilities of the tokens that `self.targets(batch)` returns, in the same shape,
                with a gradient.
            entropy: float32 [batch, seq], of each token's distribution, with a gradient; None unless `needs_entropy`.
            batch: the micro-batch, on the same device.
        """
        weights = self.weights(batch)
        if weights is None:
            raise NotImplementedError(
                f"{type(self).__name__} defines neither __call__ nor weights; define one"
            )
        return -(weights * logprobs).sum()


class CrossEntropy(Loss):
    """The mean of −log-probability over the valid tokens of the step, for pre-training."""

    def weights(self, batch: Batch) -> Tensor:
        return batch.loss_mask


class MicroBatchMean(CrossEntropy):
    """The mean over the step's micro-batches of their mean losses, as in Megatron-LM without calculate_per_token_loss.

    The logged loss is the mean over all valid tokens of the step, as in Megatron-LM.
    """

    def denominator(self, batch: Batch) -> float:
        return 1.0

    def logged_weight(self, batch: Batch) -> float | None:
        return float(batch.loss_mask.sum(dtype=torch.float64))

    def weights(self, batch: Batch) -> Tensor:
        return batch.loss_mask / batch.loss_mask.sum().clamp(min=1)


@dataclass
class Objective:
    """A loss with its micro-batch, for one forward pass of the model."""

    of: Callable[[Tensor, Tensor | None], Tensor | None]
    """Function (logprobs, entropy) of this rank's tokens → float32 scalar.

    If `token_losses` or `fused_head_loss` computes the loss, this function is used for metrics only.
    """
    temperature: float = 1.0
    needs_entropy: bool = False
    vocab_size: int | None = None
    token_losses: TokenLoss | None = None
    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    """Inputs of `token_losses` for this rank's tokens, shaped like its labels."""
    fused_head_loss: FusedHeadLoss | None = None
    """Function that computes the loss instead of the functions above."""

    def loss(
        self, logprobs: Tensor, entropy: Tensor | None, loss: Tensor | None, scale: Tensor | None
    ) -> Tensor:
        """Return the loss, a float32 scalar, from log-probabilities and entropies computed by `compute_logprobs`."""
        if loss is None:
            return scale_gradient(self.of(logprobs, entropy), scale)
        self.of(logprobs, entropy)
        return loss


def compute_logprobs(
    objective: Objective,
    hidden: Tensor,  # [..., hidden]
    weight: Tensor,  # [padded vocab or this rank's rows, hidden]
    targets: Tensor,  # int64 [...] or [..., k]
    tokens: Mapping[str, Tensor],  # the objective's, in the order of the targets
    vocab_size: int,
    softcap: float | None,
    scale: Tensor | None,
    **shard,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the log-probabilities of the targets, their entropies or None, and the sum of losses or None.

    The gradient of the sum is multiplied by `scale`. The sum is None if the objective is not a sum over tokens.
    """
    options = dict(temperature=objective.temperature, entropy=objective.needs_entropy, **shard)
    sizes = (min(vocab_size, objective.vocab_size or vocab_size), softcap)
    if objective.fused_head_loss is not None:
        shard.pop("math", None)  # it has its own matmuls; batch-invariant runs refuse such losses
        return objective.fused_head_loss(hidden, weight, targets, tokens, *sizes, scale, **shard)
    if objective.token_losses is None:
        return *linear_logprobs(hidden, weight, targets, *sizes, **options), None
    token_losses = objective.token_losses
    loss, logprobs, entropy = linear_token_losses(
        hidden, weight, targets, token_losses, tokens, *sizes, scale, **options
    )
    return logprobs, entropy, loss


def scale_gradient(loss: Tensor, scale: Tensor | None) -> Tensor:
    """Return the float32 scalar `loss`, with its gradient multiplied by `scale`."""
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
    math: HeadMath = ORDINARY,
    **shard,
) -> Tensor:
    """Compute `linear_cross_entropy` with the options of a forward pass. `shard` contains its axis, first and rows."""
    of_tokens = labels, loss_mask, vocab_size, softcap, scale
    options = dict(
        max_label_tokens=context.max_label_tokens,
        z_loss_coeff=context.output_z_loss_coeff,
        z_loss_sum=context.output_z_loss_sum,
    )
    return linear_cross_entropy(x, weight, *of_tokens, bias=bias, math=math, **shard, **options)


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
    math: HeadMath = ORDINARY,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    options = dict(bias=bias, math=math)
    return compute_logprobs(
        objective, x, weight, targets, objective.tokens, vocab_size, softcap, scale, **options
    )


def all_logits(
    x: Tensor,
    weight: Tensor,
    vocab_size: int,
    softcap: float | None,
    context: Context,
    *,
    bias: Tensor | None = None,
    math: HeadMath = ORDINARY,
) -> Tensor:
    added = None if bias is None else bias[:vocab_size]
    return linear_logits(x, weight[:vocab_size], softcap, added, math)
