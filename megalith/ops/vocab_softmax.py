"""Logits of the output matrix and their softmax, over a vocabulary that may be sharded.

With a sharded vocabulary, each rank has the logits of its own entries, and a few numbers per token are reduced: the log
of the sum of exponentials, the targets' logits, and the entropy's terms. Statistics are in fp32.

For logits z with p = softmax(z): ∂ log p_t / ∂ z_j = δ_tj − p_j and ∂ entropy / ∂ z_j = −p_j (log p_j + entropy).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megalith.comm.collectives import Axis, all_reduce_no_grad
from megalith.ops.compiled import as_one_kernel


class HeadMath(NamedTuple):
    """The forward arithmetic of the output matrix and the softmax."""

    # as torch.nn.functional.linear, without a gradient
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    statistics: Callable[..., tuple[Tensor, Tensor, Tensor | None]]  # as `vocabulary_statistics`
    sum_dtype: torch.dtype = torch.float32  # of the sum of losses over tokens


def vocabulary_statistics(
    logits: Tensor,
    row: Tensor,
    is_local: Tensor,
    temperature: float,
    entropy: bool,
    axis: Axis = Axis(),  # noqa: B008 (immutable)
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log Σ exp, the targets' logits and the entropy of the softmax of logits / temperature, in fp32.

    Args:
        logits: [tokens, rows], this rank's shard of the vocabulary.
        row: int64 [tokens, k], the targets' rows in the shard.
        is_local: bool [tokens, k], True for targets on this rank.
        temperature: divides the logits.
        entropy: compute the entropy.
        axis: the ranks among which the vocabulary is sharded.

    Returns:
        log Σ exp [tokens], the targets' logits [tokens, k] and the entropy [tokens], the same on every rank. The
        entropy is None without `entropy`.
    """
    log_sum, targets, entropies = as_one_kernel(_logit_statistics, logits, row, temperature, entropy)
    return _reduce_vocab(log_sum, targets, is_local, entropies, axis)


def _logit_statistics(
    logits: Tensor, row: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log Σ exp, the entries at `row`, and the entropy of the softmax of logits / temperature, in fp32.

    logits are [tokens, rows], log Σ exp and entropy are [tokens], the entries are [tokens, k]. The entropy is None
    without `entropy`.
    """
    z = logits.float() / temperature
    log_sum, own_entropy = z.logsumexp(-1), None
    if entropy:
        log_p = z - log_sum[:, None]
        own_entropy = -(log_p.exp() * log_p).sum(-1)
    return log_sum, z.gather(1, row), own_entropy


def _reduce_vocab(
    log_sum: Tensor, targets: Tensor, is_local: Tensor, entropy: Tensor | None, axis: Axis
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Reduce statistics of each rank's shard of the vocabulary to statistics of the full vocabulary.

    The statistics are log Σ exp [tokens], the targets' logits [tokens, k] and the softmax's entropy [tokens].
    `is_local` marks the targets on this rank.
    """
    if axis.size == 1:
        return log_sum, targets, entropy
    largest = all_reduce_no_grad(log_sum, axis, "max")
    share = (log_sum - largest).exp()
    parts = [share, *torch.where(is_local, targets, 0.0).unbind(1)]
    if entropy is not None:
        parts.append(share * (entropy - (log_sum - largest)))
    total, *sums = all_reduce_no_grad(torch.stack(parts), axis)
    if entropy is not None:
        entropy = sums.pop() / total + total.log()
    return largest + total.log(), torch.stack(sums, 1), entropy


ORDINARY = HeadMath(F.linear, vocabulary_statistics)


def real_logits(
    x: Tensor,
    matrix: Tensor,
    index: Tensor,
    real: int,
    softcap: float | None,
    bias: Tensor | None,
    math: HeadMath = ORDINARY,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return softcapped logits, the targets' rows, and a mask of the targets on this rank.

    Returns:
        Logits [tokens, rows], with padding so low that its probability is 0.
        Rows of the targets, int64 [tokens, k]; 0 for targets of other ranks.
        True for targets on this rank, bool [tokens, k].
    """
    logits = mask_padding(softcapped(math.linear(x, matrix, bias), softcap), real)
    return logits, *local_rows(index, logits.shape[1])


def local_rows(index: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the local rows of `index`, 0 for rows of other ranks, and a mask of the rows on this rank."""
    is_local = (index >= 0) & (index < rows)
    return torch.where(is_local, index, 0), is_local


def mask_padding(logits: Tensor, real: int) -> Tensor:
    """Set the entries of logits [tokens, rows] at or after index `real` so low that their probability is 0,
    in place.
    """
    logits[:, real:] = max(torch.finfo(logits.dtype).min, -1e30)
    return logits


def logits_gradient(
    logits: Tensor,  # [tokens, rows], from `real_logits`
    row: Tensor,  # int64 [tokens, k]
    is_local: Tensor,  # bool [tokens, k]
    logprobs: Tensor,  # float32 [tokens, k]: gradient of the targets' log-probabilities / temperature
    entropies: Tensor | None,  # float32 [tokens]: gradient of the entropies / temperature, if any
    log_sum: Tensor,
    entropy: Tensor | None,
    temperature: float,
    softcap: float | None,
    log_sums: Tensor | None = None,  # float32 [tokens]: minus the z-loss's gradient by log Σ exp
) -> Tensor:
    """Return the gradient of the logits before soft-capping, in their dtype."""
    rest = (entropies, log_sum, entropy, temperature)
    total = logprobs.sum(1) if log_sums is None else logprobs.sum(1) + log_sums
    grad = as_one_kernel(_softmax_gradient, logits, total, *rest)
    grad.scatter_add_(1, row, (logprobs * is_local).to(grad.dtype))
    return grad if softcap is None else grad * softcap_slope(logits, softcap)


def _softmax_gradient(
    logits: Tensor,
    logprobs: Tensor,
    entropies: Tensor | None,
    log_sum: Tensor,
    entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """Return −p · (logprobs + entropies · (log p + entropy)), where p is the softmax of logits / temperature.

    The result has the shape and dtype of logits [tokens, rows]. `logprobs` and `entropies` are gradients, float32
    [tokens].
    """
    log_p, slope = logits.float() / temperature - log_sum[:, None], logprobs[:, None]
    if entropies is not None:
        slope = slope + entropies[:, None] * (log_p + entropy[:, None])
    return (-log_p.exp() * slope).to(logits.dtype)


def linear_logits(
    hidden: Tensor,
    weight: Tensor,
    softcap: float | None = None,
    bias: Tensor | None = None,
    math: HeadMath = ORDINARY,
) -> Tensor:
    """Return the softcapped logits [..., rows] of hidden [..., hidden].

    `weight` [rows, hidden] is the output matrix or some rows of it, and `bias` [rows] has the entries of these rows.
    """
    bias = None if bias is None else bias.to(hidden.dtype)
    return softcapped(math.linear(hidden, weight.to(hidden.dtype), bias), softcap)


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return softcap · tanh(logits / softcap), or the logits if softcap is None."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def softcap_slope(logits: Tensor, softcap: float) -> Tensor:
    """Return the derivative of `softcapped`, given its results; 0 where a result is -inf, as for padding."""
    return 1 - (logits.clamp(min=-softcap) / softcap).square()
