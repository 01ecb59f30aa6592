"""Language-model losses without materialized logits: output matmul and loss, chunk by chunk of tokens.

The logits of a batch are by far the largest tensor of training (32 × 1024 tokens over 50,304 entries are 6.6 GB in
fp32). Here only one chunk's logits exist at a time. The gradient is computed in the forward pass, together with the
softmax; the backward pass scales it.

With a sharded vocabulary, each rank has the logits of its own entries, and two numbers per token are reduced: the log
of the sum of exponentials, and the label's logit.

The same holds for every loss that is a sum over tokens (`linear_token_losses`), because its derivatives by a token's
log-probability and entropy are known at once. A loss over several tokens needs all of them first: `linear_logprobs`
keeps two numbers per token and the last chunk's logits, and its backward pass computes the other chunks' logits again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from megalith.comm.collectives import Axis, all_reduce_no_grad
from megalith.errors import ConfigError
from megalith.ops import kernels as fused
from megalith.ops.compiled import as_one_kernel

# Logits per chunk. On an H200 the GEMMs of 3,328 tokens with GPT-2's vocabulary use all SMs; with 2,560 tokens the
# gradient's takes a quarter longer.
CHUNK_ELEMENTS = {"cpu": 2**22, "cuda": 5 * 2**25}
# Large vocabularies use a gigabyte in bf16, because each chunk reads and writes the head's fp32 wgrad. For Llama-3-8B's
# 128,256 entries, chunks of 4,096 tokens save 8 ms per step of 16,384 tokens compared with chunks of 1,280.
LARGE_VOCABULARY, LARGE_CHUNK = 2**16, 2**29
# Logits that `linear_logprobs` keeps on a CPU for its backward pass. Elsewhere it keeps one chunk, as many as its
# backward pass has at once.
KEPT_ELEMENTS = 2**26
CHUNK_MULTIPLE = 256  # tokens; faster for matmuls
FEW_LABELS = 0.75  # fraction of tokens with labels above which all tokens get logits
NO_LABEL = -1  # label of a sample that is excluded from classification


class HeadMath(NamedTuple):
    """The forward arithmetic of the output matrix and the softmax."""

    linear: Callable[
        [Tensor, Tensor, Tensor | None], Tensor
    ]  # as torch.nn.functional.linear, without a gradient
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
        [tokens], [tokens, k] and [tokens], the same on every rank. The entropy is None without `entropy`.
    """
    log_sum, targets, entropies = as_one_kernel(_logit_statistics, logits, row, temperature, entropy)
    return _reduce_vocab(log_sum, targets, is_local, entropies, axis)


ORDINARY = HeadMath(F.linear, vocabulary_statistics)


def linear_cross_entropy(
    hidden: Tensor,  # [..., hidden]
    weight: Tensor,  # [padded vocab, hidden], any float dtype; cast to hidden's
    labels: Tensor,  # int64 [...], each < vocab_size
    loss_mask: Tensor,  # float32 [...], weight of each token
    vocab_size: int,
    softcap: float | None = None,
    scale: Tensor | None = None,  # float32 scalar, factor on the gradient; None: 1
    *,
    axis: Axis = Axis(),  # noqa: B008 (immutable)
    first: int = 0,
    rows: int | None = None,
    bias: Tensor | None = None,  # float32, one entry per row of weight
    max_label_tokens: int | None = None,  # maximum number of tokens with nonzero weight; None: unknown
    math: HeadMath = ORDINARY,
    z_loss_coeff: float = 0.0,
    z_loss_sum: Tensor | None = None,  # float32 scalar
) -> Tensor:
    """Return Σ over tokens of loss_mask · −log softmax(hidden · weightᵀ + bias)[label], a float32 scalar.

    Softmax and sums are in fp32. Rows of `weight` from vocab_size on are padding and ignored. With `softcap` c, logits
    become c · tanh(logits / c) (Gemma 2). Over an `axis`, `weight` is this rank's shard of rows, starting at `first`; a
    full rank has `rows` rows. The result is the same on every rank, and the gradient of hidden must be summed over
    ranks. The gradient is multiplied by `scale` before it is first rounded, so that an fp16 loss scale preserves small
    probabilities; the result is not. If `max_label_tokens` is small, logits of the other tokens are not computed.

    The gradient includes that of the z-loss z_loss_coeff · Σ loss_mask · (log Σ exp logits)² (Chowdhery et al. 2022,
    section 5); the result does not. With a coefficient, Σ loss_mask · (log Σ exp logits)² is added to `z_loss_sum`.
    """
    if not torch.is_grad_enabled():  # in an autograd function, parameters require gradients even then
        hidden, weight = hidden.detach(), weight.detach()
    hidden, labels, weights = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1), loss_mask.reshape(-1)
    if max_label_tokens is not None and max_label_tokens <= FEW_LABELS * labels.numel():
        counted = _first_labelled(weights, max_label_tokens)
        hidden, labels, weights = (x.index_select(0, counted) for x in (hidden, labels, weights))
    return _LinearLosses.apply(
        hidden,
        weight,
        labels - first,
        {"weights": weights},
        None,
        max(0, vocab_size - first),
        loss_chunk_tokens(rows or weight.shape[0], hidden.device.type),
        softcap,
        1.0,
        False,
        axis,
        scale,
        bias,
        math,
        z_loss_coeff,
        z_loss_sum,
    )[0]


def _first_labelled(weights: Tensor, max_label_tokens: int) -> Tensor:
    """Return the indices of tokens with nonzero weight, int64, followed by indices of other tokens.

    The length is a multiple of CHUNK_MULTIPLE and depends only on host values, so that few sizes occur.
    """
    count = min(weights.numel(), max(1, -(-max_label_tokens // CHUNK_MULTIPLE)) * CHUNK_MULTIPLE)
    return (weights == 0).argsort(stable=True)[:count]


TokenLoss = Callable[[Tensor, Tensor | None, Mapping[str, Tensor]], Tensor]
"""Function from log-probabilities, entropies (or None), both float32, and named per-token tensors to the tokens'
losses, float32. A token's loss must not depend on other tokens."""


def linear_token_losses(
    hidden: Tensor,  # [..., hidden]
    weight: Tensor,  # [padded vocab, hidden], any float dtype; cast to hidden's
    targets: Tensor,  # int64 [...], each < vocab_size
    of: TokenLoss,
    tokens: Mapping[str, Tensor],  # [...] each, without a gradient
    vocab_size: int,
    softcap: float | None = None,
    scale: Tensor | None = None,  # float32 scalar, factor on the gradient; None: 1
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    axis: Axis = Axis(),  # noqa: B008 (immutable)
    first: int = 0,
    rows: int | None = None,
    bias: Tensor | None = None,  # float32, one entry per row of weight
    math: HeadMath = ORDINARY,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the sum of `of` over tokens, a float32 scalar, and the log-probabilities and entropies of the targets.

    Log-probabilities and entropies are those of `linear_logprobs`, without gradient. Without `entropy`, entropies are
    None and `of` gets None.

    It needs one pass with three matmuls, like `linear_cross_entropy`; `linear_logprobs` and its backward need four.
    """
    if not torch.is_grad_enabled():
        hidden, weight = hidden.detach(), weight.detach()
    loss, logprobs, entropies = _LinearLosses.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        targets.reshape(-1) - first,
        {name: x.reshape(-1) for name, x in tokens.items()},
        of,
        max(0, vocab_size - first),
        loss_chunk_tokens(rows or weight.shape[0], hidden.device.type),
        softcap,
        temperature,
        entropy,
        axis,
        scale,
        bias,
        math,
    )
    return loss, logprobs.view(targets.shape), None if entropies is None else entropies.view(targets.shape)


def loss_chunk_tokens(rows: int, device_type: str = "cuda") -> int:
    """Return the number of tokens per chunk for logits of `rows` entries."""
    large = device_type == "cuda" and rows > LARGE_VOCABULARY
    tokens = (LARGE_CHUNK if large else CHUNK_ELEMENTS[device_type]) // rows
    return max(1, tokens - tokens % CHUNK_MULTIPLE if tokens > CHUNK_MULTIPLE else tokens)


class _LinearLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,  # [tokens, hidden]
        weight: Tensor,  # [rows, hidden]
        index: Tensor,  # int64 [tokens]: the label's row in weight, out of range if another rank has it
        tokens: Mapping[str, Tensor],  # [tokens] each
        of: TokenLoss | None,  # None: −tokens["weights"] · log-probability
        real: int,  # rows from here on are padding
        chunk: int,  # tokens
        softcap: float | None,
        temperature: float,
        entropy: bool,
        axis: Axis,
        scale: Tensor | None,
        bias: Tensor | None,  # [rows]
        math: HeadMath,
        z_loss_coeff: float = 0.0,  # only without `of`
        z_loss_sum: Tensor | None = None,  # the z-loss before the coefficient is added to it
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        matrix, added = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        wants_gradient = hidden.requires_grad or weight.requires_grad
        plain = of is None and axis.size == 1 and softcap is None and math is ORDINARY and not z_loss_coeff
        fuses = fused.AVAILABLE and hidden.is_cuda and wants_gradient and plain
        losses, grads, results = [], [], []
        factor = scale if wants_gradient and scale is not None else torch.ones((), device=hidden.device)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if weight.requires_grad else None
        grad_bias = None if bias is None else torch.zeros_like(bias)
        for x, row, *values in zip(*(t.split(chunk) for t in (hidden, index, *tokens.values()))):
            if fuses:
                grad = F.linear(x, matrix, added)  # [chunk, rows]: logits, overwritten by their gradient
                losses.append(fused.softmax_loss_(grad, row, values[0] * factor, real).sum() / factor)
            else:
                logits, at, is_local = real_logits(x, matrix, row[:, None], real, softcap, added, math)
                log_sum, logit, entropies = math.statistics(logits, at, is_local, temperature, entropy, axis)
                logprobs, chunk_tokens = logit[:, 0] - log_sum, dict(zip(tokens, values))
                loss, *slopes = _loss_and_slopes(
                    of, logprobs, entropies, chunk_tokens, wants_gradient, math.sum_dtype
                )
                losses.append(loss)
                results.append((logprobs, entropies))
                if z_loss_coeff and z_loss_sum is not None:
                    z_loss_sum += (values[0] * log_sum.square()).sum()
                if wants_gradient:
                    slopes = [None if slope is None else slope * factor / temperature for slope in slopes]
                    softmax = (log_sum, entropies, temperature, softcap)
                    of_sum = 2 * z_loss_coeff * log_sum * slopes[0] if z_loss_coeff else None
                    grad = _logits_gradient(
                        logits, at, is_local, slopes[0][:, None], slopes[1], *softmax, of_sum
                    )
                del logits
            if wants_gradient:
                grads.append(grad @ matrix)
                if grad_weight is not None:  # None if the matrix is frozen
                    grad_weight = add_matmul(grad_weight, grad.T, x)
                if grad_bias is not None:
                    grad_bias += grad.sum(0, dtype=torch.float32)
                del grad  # before the next chunk's is allocated
        if wants_gradient:
            ctx.save_for_backward(torch.cat(grads), grad_weight, grad_bias)
        each = (None if of is None or part[0] is None else torch.cat(part) for part in zip(*results))
        logprobs, entropies = each if results else (None, None)
        ctx.mark_non_differentiable(*(x for x in (logprobs, entropies) if x is not None))
        return torch.stack(losses).sum(), logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor, *_unused):
        grad_hidden, *parameter_grads = ctx.saved_tensors
        grad_weight, grad_bias = (None if grad is None else grad * grad_loss for grad in parameter_grads)
        # In fp32: a rounded factor would make the gradients below the head inconsistent with the head's.
        grad_hidden = as_one_kernel(_scaled, grad_hidden, grad_loss)
        return grad_hidden, grad_weight, *[None] * 10, grad_bias, None, None, None


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    return (x.float() * factor).to(x.dtype)


def _loss_and_slopes(
    of: TokenLoss | None,
    logprobs: Tensor,  # float32 [tokens]
    entropies: Tensor | None,  # float32 [tokens]
    tokens: Mapping[str, Tensor],
    wants_gradient: bool,
    sum_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the sum of the tokens' losses, and its derivatives by log-probabilities and by entropies.

    Derivatives that are not needed are None.
    """
    if of is None:
        weights = tokens["weights"]
        return -(weights * logprobs).sum(dtype=sum_dtype), -weights, None
    if not wants_gradient:
        losses = _each_token(of(logprobs, entropies, tokens), logprobs)
        return losses.sum(dtype=sum_dtype), None, None
    with torch.enable_grad():
        inputs = [logprobs.detach().requires_grad_()]
        inputs += [] if entropies is None else [entropies.detach().requires_grad_()]
        losses = of(inputs[0], inputs[1] if inputs[1:] else None, tokens)
        loss = _each_token(losses, logprobs).sum(dtype=sum_dtype)
        slopes = torch.autograd.grad(loss, inputs, allow_unused=True)
    by_logprobs = torch.zeros_like(logprobs) if slopes[0] is None else slopes[0]
    return loss.detach(), by_logprobs, slopes[1] if slopes[1:] else None


def _each_token(losses: Tensor, logprobs: Tensor) -> Tensor:
    """Return `losses`. Raises ConfigError unless there is one per token."""
    if losses.shape != logprobs.shape:
        raise ConfigError(
            f"token_losses returned a tensor of shape {list(losses.shape)} for log-probabilities "
            f"of shape {list(logprobs.shape)}; return one loss per token"
        )
    return losses


def linear_logprobs(
    hidden: Tensor,  # [..., hidden]
    weight: Tensor,  # [padded vocab, hidden], any float dtype; cast to hidden's
    targets: Tensor,  # int64 [...] or [..., k], each < vocab_size
    vocab_size: int,
    softcap: float | None = None,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    axis: Axis = Axis(),  # noqa: B008 (immutable)
    first: int = 0,
    rows: int | None = None,
    bias: Tensor | None = None,  # float32, one entry per row of weight
    math: HeadMath = ORDINARY,
) -> tuple[Tensor, Tensor | None]:
    """Return log softmax(hidden · weightᵀ / temperature)[target], float32 with the shape of targets, and entropies.

    With `entropy`, the entropies of the softmax are float32 [...]; otherwise they are None.

    Padding, softcap (applied before the temperature) and `axis` are as in `linear_cross_entropy`: results are the same
    on every rank, and the gradient of hidden must be summed over ranks.
    """
    if not torch.is_grad_enabled():
        hidden, weight = hidden.detach(), weight.detach()
    tokens = hidden.shape[:-1]
    logprobs, entropies = _LinearLogprobs.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        targets.reshape(tokens.numel(), -1) - first,
        max(0, vocab_size - first),
        loss_chunk_tokens(rows or weight.shape[0], hidden.device.type),
        softcap,
        temperature,
        entropy,
        axis,
        bias,
        math,
    )
    return logprobs.view(targets.shape), None if entropies is None else entropies.view(tokens)


class _LinearLogprobs(torch.autograd.Function):
    """Autograd function of `linear_logprobs`.

    The backward pass follows the forward pass at once, and starts with the chunks whose logits were kept.

    For logits z with p = softmax(z): ∂ log p_t / ∂ z_j = δ_tj − p_j and ∂ entropy / ∂ z_j = −p_j (log p_j + entropy).
    """

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,  # [tokens, hidden]
        weight: Tensor,  # [rows, hidden]
        index: Tensor,  # int64 [tokens, k]: the targets' rows in weight, out of range if another rank has them
        real: int,  # rows from here on are padding
        chunk: int,  # tokens
        softcap: float | None,
        temperature: float,
        entropy: bool,
        axis: Axis,
        bias: Tensor | None,  # [rows]
        math: HeadMath,
    ) -> tuple[Tensor, Tensor | None]:  # float32 [tokens, k] and [tokens]
        ctx.real, ctx.chunk, ctx.softcap, ctx.temperature = real, chunk, softcap, temperature
        matrix, results = weight.to(hidden.dtype), []
        added = None if bias is None else bias.to(hidden.dtype)
        ctx.kept = {}  # chunk → its logits; the backward pass takes them out
        first_kept = _first_kept(len(hidden), chunk, len(matrix), hidden.device.type)
        keeps = math is ORDINARY and any(ctx.needs_input_grad)
        for number, (x, targets) in enumerate(zip(hidden.split(chunk), index.split(chunk))):
            logits, row, is_local = real_logits(x, matrix, targets, real, softcap, added, math)
            results.append(math.statistics(logits, row, is_local, temperature, entropy, axis))
            if keeps and number >= first_kept:
                ctx.kept[number] = logits
            del logits
        log_sum, logit, entropies = (None if part[0] is None else torch.cat(part) for part in zip(*results))
        ctx.save_for_backward(hidden, weight, index, log_sum, entropies, bias)
        return logit - log_sum[:, None], entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs: Tensor, grad_entropy: Tensor | None):
        hidden, weight, index, log_sum, entropy, bias = ctx.saved_tensors
        matrix, grads = weight.to(hidden.dtype), []
        added = None if bias is None else bias.to(hidden.dtype)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_logprobs = grad_logprobs / ctx.temperature
        whole = [hidden, index, grad_logprobs, log_sum]
        if entropy is not None:
            whole += [grad_entropy / ctx.temperature, entropy]
        chunks = [*zip(*(tensor.split(ctx.chunk) for tensor in whole))]
        for number in reversed(range(len(chunks))):
            x, targets, grad, log_sums, *entropy_parts = chunks[number]
            if (logits := ctx.kept.pop(number, None)) is None:
                logits = real_logits(x, matrix, targets, ctx.real, ctx.softcap, added)[0]
            row, is_local = _local_rows(targets, logits.shape[1])
            by_entropy, entropies = entropy_parts or (None, None)
            softmax = (log_sums, entropies, ctx.temperature, ctx.softcap)
            product = _logits_gradient(logits, row, is_local, grad, by_entropy, *softmax)
            grads.append(product @ matrix)
            if grad_weight is not None:
                grad_weight = add_matmul(grad_weight, product.T, x)
            if grad_bias is not None:
                grad_bias += product.sum(0, dtype=torch.float32)
            del logits, product  # before the next chunk's are allocated
        return torch.cat(grads[::-1]), grad_weight, *[None] * 7, grad_bias, None


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
    return logits, *_local_rows(index, logits.shape[1])


def _local_rows(index: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the rows of `index` on this rank, 0 for rows of other ranks, and a mask of the local ones."""
    is_local = (index >= 0) & (index < rows)
    return torch.where(is_local, index, 0), is_local


def _first_kept(tokens: int, chunk: int, rows: int, device_type: str) -> int:
    """Return the number of the first chunk of `tokens` whose logits are kept: always the last one, and those before it
    that fit KEPT_ELEMENTS."""
    count = -(-tokens // chunk)
    fit = KEPT_ELEMENTS // rows // chunk if device_type == "cpu" else 0
    return count - max(1, fit)


def mask_padding(logits: Tensor, real: int) -> Tensor:
    """Set the entries of logits [tokens, rows] from `real` on so low that their probability is 0, in place."""
    logits[:, real:] = max(torch.finfo(logits.dtype).min, -1e30)
    return logits


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


def _logits_gradient(
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
    """Return the derivative of `softcapped` at its results; 0 where they are -inf, as for padding."""
    return 1 - (logits.clamp(min=-softcap) / softcap).square()


def _reduce_vocab(
    log_sum: Tensor, targets: Tensor, is_local: Tensor, entropy: Tensor | None, axis: Axis
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Reduce statistics of each rank's shard of the vocabulary to those of the full vocabulary.

    They are log Σ exp [tokens], the targets' logits [tokens, k] and the softmax's entropy [tokens]. `is_local` marks
    the targets on this rank.
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


def add_matmul(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add a · b to total, float32.

    On a GPU the matmul accumulates directly, without rounding to the dtype of a and b.
    """
    if a.is_cuda and a.dtype != torch.float32:
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return total.add_(a @ b)
