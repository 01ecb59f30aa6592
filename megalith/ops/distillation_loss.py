"""Divergence of a model from a teacher without materialized logits, computed in chunks of tokens.

As in ops/cross_entropy.py, a chunk's gradient is computed together with its loss.

A teacher's predictions come from its own forward pass or from files. Files contain, per token, the k largest
log-probabilities (entries K) and the log-probability of all other entries together (the tail). With stored predictions,
distributions over k + 1 entries are compared,

     D = Σ_K p · log(p / q) + p_tail · log(p_tail / q_tail)        q_tail = 1 − Σ_K q

which is the loss with a "ghost token" of Anshumann et al. 2025 (Sparse Logit Sampling). It equals the divergence over
the full vocabulary from a p̃ whose tail has the shape of q's, p̃_j = p_tail · q_j / q_tail, and the gradients with
respect to the logits, q − p̃, are equal too. So only p̃ is computed here. The same holds for the other divergences,
which are sums of homogeneous functions of p and q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalith.comm.collectives import Axis, all_gather_replicated, all_reduce_no_grad
from megalith.ops.compiled import as_one_kernel
from megalith.ops.loss_chunks import HeadGradients, loss_chunk_tokens
from megalith.ops.vocab_softmax import real_logits, softcap_slope

Divergence = Literal["forward_kl", "reverse_kl", "generalized_jsd", "skewed_forward_kl", "skewed_reverse_kl"]


@dataclass(frozen=True)
class TeacherOutput:
    """Final hidden states and output layer of a teacher."""

    hidden: Tensor  # [tokens, hidden size of the teacher], input of the output layer
    weight: Tensor  # [padded vocab or this rank's rows, hidden size of the teacher]
    bias: Tensor | None  # [rows]
    softcap: float | None

    def split(self, size: int) -> list[TeacherOutput]:
        weight = self.weight.to(self.hidden.dtype)
        bias = None if self.bias is None else self.bias.to(self.hidden.dtype)
        chunks = self.hidden.reshape(-1, weight.shape[1]).split(size)
        return [TeacherOutput(chunk, weight, bias, self.softcap) for chunk in chunks]

    def logits(self, row: Tensor, real: int, *_model) -> Tensor:
        """Return the teacher's logits, [tokens, local rows]."""
        return real_logits(self.hidden, self.weight, row, real, self.softcap, self.bias)[0]


@dataclass(frozen=True)
class TopLogProbs:
    """Stored top-k entries of a teacher's softmax(logits / T)."""

    indices: Tensor  # int64 [..., k]: most likely entries, as rows of this rank's shard of the vocabulary
    logprobs: Tensor  # float32 [..., k + 1]: of these, and of all others together; NONE if there are none

    def split(self, size: int) -> list[TopLogProbs]:
        flat = self.indices.flatten(0, -2).split(size), self.logprobs.flatten(0, -2).split(size)
        return [TopLogProbs(*chunk) for chunk in zip(*flat)]

    def logits(self, row: Tensor, real: int, logits: Tensor, temperature: float, axis: Axis) -> Tensor:
        """Return log p̃ · T (module docstring), float32 [tokens, local rows]. `logits` are the model's own."""
        is_local = (self.indices >= 0) & (self.indices < logits.shape[1])  # [tokens, k]
        at = torch.where(
            is_local, self.indices, logits.shape[1]
        )  # an extra column for entries of other ranks
        wide = F.pad(logits.float() / temperature, (0, 1), value=NONE)
        rest = wide.scatter(1, at, NONE)
        log_sum = rest.logsumexp(1, keepdim=True)  # of the model's tail
        if axis.size > 1:
            largest = all_reduce_no_grad(log_sum, axis, "max")
            log_sum = largest + all_reduce_no_grad((log_sum - largest).exp(), axis).log()
        *_, tail = self.logprobs.split([at.shape[1], 1], 1)
        completed = (rest - log_sum + tail).clamp(min=NONE).scatter(1, at, self.logprobs[:, :-1])
        return completed[:, :-1] * temperature


NONE = -1e30  # log-probability of an empty set; finite, so that differences are not NaN


@dataclass(frozen=True)
class TeacherTargets:
    """A teacher's predictions for the tokens of a forward pass, and settings of the loss."""

    teacher: TeacherOutput | TopLogProbs
    share: float
    """α in a token's loss (1 − α) · cross-entropy + α · T² · divergence (Hinton et al. 2015)."""
    temperature: float
    """T: the divergence compares softmax(logits / T)."""
    divergence: Divergence
    """With p the teacher's and q the model's distribution: forward Σ p · log(p / q), reverse Σ q · log(q / p).

    With β = `mixture`, generalized_jsd is β · KL(p ‖ m) + (1 − β) · KL(q ‖ m) with m = β · p + (1 − β) · q (GKD,
    Agarwal et al. 2024), skewed_forward_kl is KL(p ‖ β · p + (1 − β) · q), and skewed_reverse_kl
    KL(q ‖ (1 − β) · p + β · q) (DistiLLM, Ko et al. 2024).
    """
    mixture: float = 0.5
    """β, above 0 and below 1; the first two divergences do not read it."""


@torch.no_grad()
def linear_top_logprobs(
    hidden: Tensor,  # [..., hidden]
    weight: Tensor,  # [padded vocab, hidden]
    k: int,
    vocab_size: int,
    softcap: float | None = None,
    temperature: float = 1.0,
    *,
    axis: Axis = Axis(),  # noqa: B008 (immutable)
    first: int = 0,
    rows: int | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the k largest log-probabilities of softmax(logits / temperature), and their entries.

    The result is the same on every rank.

    Returns:
        Log-probabilities in descending order, followed by the log-probability of all other entries together, float32
            [..., k + 1].
        Entries, int64 [..., k].
    """
    flat, matrix = hidden.reshape(-1, hidden.shape[-1]), weight.to(hidden.dtype)
    added, real = None if bias is None else bias.to(hidden.dtype), max(0, vocab_size - first)
    none, results = torch.zeros(1, 1, dtype=torch.int64, device=hidden.device), []
    for x in flat.split(loss_chunk_tokens(2 * (rows or weight.shape[0]), hidden.device.type)):
        z = real_logits(x, matrix, none, real, softcap, added)[0].float() / temperature
        largest, at = F.pad(z, (0, max(0, k - z.shape[1])), value=NONE).topk(k)
        largest, at = (all_gather_replicated(log_sums, axis, 1) for log_sums in (largest, at + first))
        values, order = largest.topk(k)
        indices = at.gather(1, order)
        here = torch.where((indices >= first) & (indices < first + z.shape[1]), indices - first, z.shape[1])
        rest = F.pad(z, (0, 1), value=NONE).scatter(1, here, NONE)
        parts = torch.stack([z.logsumexp(1), rest.logsumexp(1)], 1)  # all entries, and the tail
        most = all_reduce_no_grad(parts, axis, "max")
        whole, tail = (most + all_reduce_no_grad((parts - most).exp(), axis).log()).split(1, 1)
        results.append((torch.cat([values - whole, (tail - whole).clamp(min=NONE)], 1), indices))
    logprobs, indices = (torch.cat(log_sums).unflatten(0, hidden.shape[:-1]) for log_sums in zip(*results))
    return logprobs, indices


def linear_distillation(
    hidden: Tensor,  # [..., hidden]
    weight: Tensor,  # [padded vocab, hidden], any float dtype; cast to hidden's
    labels: Tensor,  # int64 [...], each < vocab_size
    weights: Tensor,  # float32 [...], weight of each token
    targets: TeacherTargets,  # for these tokens, in this order
    vocab_size: int,
    softcap: float | None = None,
    scale: Tensor | None = None,  # float32 scalar, factor on the gradient; None: 1
    *,
    axis: Axis = Axis(),  # noqa: B008 (immutable)
    first: int = 0,
    rows: int | None = None,
    bias: Tensor | None = None,  # float32, one entry per row of weight
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted sum of the tokens' losses, and the log-probabilities and divergences of the tokens.

    Padding, softcap, `scale` and `axis` are as in `linear_cross_entropy`. The teacher gets no gradient.

    Returns:
        The sum, a float32 scalar with a gradient.
        Each token's log-probability of its label, float32 [...], without gradient.
        Each token's divergence, float32 [...], without gradient.
    """
    if not torch.is_grad_enabled():
        hidden, weight = hidden.detach(), weight.detach()
    loss, logprobs, divergences = _LinearDistillation.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1, 1) - first,
        weights.reshape(-1),
        targets,
        max(0, vocab_size - first),
        loss_chunk_tokens(2 * (rows or weight.shape[0]), hidden.device.type),
        softcap,
        axis,
        scale,
        bias,
    )
    return loss, logprobs.view(labels.shape), divergences.view(labels.shape)


class _LinearDistillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,  # [tokens, hidden]
        weight: Tensor,  # [rows, hidden]
        index: Tensor,  # int64 [tokens, 1]: the label's row in weight, out of range if another rank has it
        weights: Tensor,  # float32 [tokens]
        targets: TeacherTargets,
        real: int,  # rows from here on are padding
        chunk: int,  # tokens
        softcap: float | None,
        axis: Axis,
        scale: Tensor | None,
        bias: Tensor | None,  # [rows]
    ) -> tuple[Tensor, Tensor, Tensor]:
        matrix, added = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        wants_gradient = hidden.requires_grad or weight.requires_grad
        factor = torch.ones((), device=hidden.device) if scale is None else scale
        gradients, results = HeadGradients(weight, bias, weight.requires_grad), []
        whole = (hidden, targets.teacher, index, weights)
        for x, teacher, row, w in zip(*(t.split(chunk) for t in whole)):
            logits, at, is_local = real_logits(x, matrix, row, real, softcap, added)
            expected = teacher.logits(row, real, logits, targets.temperature, axis)
            logprobs, divergences, grad = _loss_of_logits(logits, expected, at, is_local, targets, axis)
            results.append((logprobs, divergences))
            if wants_gradient:
                if softcap is not None:
                    grad = grad * softcap_slope(logits, softcap)
                grad = (grad * (w * factor)[:, None]).to(x.dtype)
                gradients.add(grad, x, matrix)
            del logits, expected, grad
        logprobs, divergences = (torch.cat(part) for part in zip(*results))
        if wants_gradient:
            ctx.save_for_backward(torch.cat(gradients.inputs), gradients.weight, gradients.bias)
        ctx.mark_non_differentiable(logprobs, divergences)
        share = targets.share * targets.temperature**2
        return (weights * (share * divergences - (1 - targets.share) * logprobs)).sum(), logprobs, divergences

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor, *_unused):
        grad_hidden, *parameter_grads = ctx.saved_tensors
        grad_weight, grad_bias = (None if grad is None else grad * grad_loss for grad in parameter_grads)
        return (grad_hidden.float() * grad_loss).to(grad_hidden.dtype), grad_weight, *[None] * 8, grad_bias


def _loss_of_logits(
    logits: Tensor,  # [tokens, local rows]
    expected: Tensor,  # the teacher's, [tokens, local rows]
    at: Tensor,  # int64 [tokens, 1]: the label's row, 0 if another rank has it
    is_local: Tensor,  # bool [tokens, 1]: the label is on this rank
    targets: TeacherTargets,
    axis: Axis,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities and divergences, float32 [tokens], and the loss's gradient with respect to the logits,
    float32 [tokens, local rows]."""
    share, temperature, kind = targets.share, targets.temperature, (targets.divergence, targets.mixture)
    log_sums = as_one_kernel(_log_sums, logits, expected, temperature)
    if axis.size > 1:
        largest = all_reduce_no_grad(log_sums, axis, "max")
        log_sums = largest + all_reduce_no_grad((log_sums - largest).exp(), axis).log()
    log_sum, log_sum_q, log_sum_p = log_sums
    label = torch.where(is_local, logits.gather(1, at).float(), 0.0)[:, 0]
    parts = as_one_kernel(_divergences, logits, expected, log_sum_q, log_sum_p, temperature, *kind)
    label, divergence, mean_slope = all_reduce_no_grad(torch.stack([label, *parts]), axis)
    sums = (log_sum, log_sum_q, log_sum_p, mean_slope)
    grad = as_one_kernel(_slopes, logits, expected, *sums, share, temperature, *kind)
    grad.scatter_add_(1, at, (share - 1) * is_local.to(grad.dtype))
    return label - log_sum, divergence, grad


def _log_sums(logits: Tensor, expected: Tensor, temperature: float) -> Tensor:
    """Return log Σ exp of the model's logits, of the model's logits / T, and of the teacher's logits / T: float32 [3,
    tokens].
    """
    z, t = logits.float(), expected.float() / temperature
    return torch.stack([z.logsumexp(-1), (z / temperature).logsumexp(-1), t.logsumexp(-1)])


def _divergences(
    logits: Tensor,
    expected: Tensor,
    log_sum_q: Tensor,
    log_sum_p: Tensor,
    temperature: float,
    kind: Divergence,
    mixture: float,
) -> Tensor:
    """Return the contributions of these entries to the divergence D and to Σ q · ∂D/∂q, float32 [2, tokens]."""
    log_q = logits.float() / temperature - log_sum_q[:, None]
    log_p = expected.float() / temperature - log_sum_p[:, None]
    p, q = log_p.exp(), log_q.exp()
    match kind:
        case "forward_kl":
            terms = p * (log_p - log_q)
        case "generalized_jsd":
            log_m = _log_mixture(log_p, log_q, mixture)
            terms = mixture * p * (log_p - log_m) + (1 - mixture) * q * (log_q - log_m)
        case "skewed_forward_kl":
            terms = p * (log_p - _log_mixture(log_p, log_q, mixture))
        case "skewed_reverse_kl":
            terms = q * (log_q - _log_mixture(log_q, log_p, mixture))
        case _:
            terms = q * (log_q - log_p)
    return torch.stack([terms.sum(1), (q * _derivative(log_p, log_q, kind, mixture)).sum(1)])


def _derivative(log_p: Tensor, log_q: Tensor, kind: Divergence, mixture: float) -> Tensor:
    """Return the derivative of the divergence with respect to q, up to a constant.

    Returns 0 for forward_kl: the gradient of its logits is q − p, without this derivative.
    """
    match kind:
        case "forward_kl":
            return torch.zeros_like(log_q)
        case "generalized_jsd":
            return (1 - mixture) * (log_q - _log_mixture(log_p, log_q, mixture))
        case "skewed_forward_kl":
            return (mixture - 1) * (log_p - _log_mixture(log_p, log_q, mixture)).exp()
        case "skewed_reverse_kl":
            difference = log_q - _log_mixture(log_q, log_p, mixture)
            return difference - mixture * difference.exp()
        case _:
            return log_q - log_p


def _log_mixture(log_a: Tensor, log_b: Tensor, mixture: float) -> Tensor:
    """Return log(β · a + (1 − β) · b) from log a and log b, where β is `mixture`."""
    return torch.logaddexp(log_a + math.log(mixture), log_b + math.log1p(-mixture))


def _slopes(
    logits: Tensor,
    expected: Tensor,
    log_sum: Tensor,
    log_sum_q: Tensor,
    log_sum_p: Tensor,
    mean_slope: Tensor,
    share: float,
    temperature: float,
    kind: Divergence,
    mixture: float,
) -> Tensor:
    """Return (1 − α) · q₁ + α · T · ∂D/∂(logits / T), where D is the divergence and q₁ is q at temperature 1.

    With g = ∂D/∂q, ∂D/∂(logits / T) is q · (g − Σ q · g); the sum is `mean_slope`.
    """
    log_q = logits.float() / temperature - log_sum_q[:, None]
    log_p = expected.float() / temperature - log_sum_p[:, None]
    q = log_q.exp()
    if kind == "forward_kl":
        slope = q - log_p.exp()
    else:
        slope = q * (_derivative(log_p, log_q, kind, mixture) - mean_slope[:, None])
    return (1 - share) * (logits.float() - log_sum[:, None]).exp() + share * temperature * slope
