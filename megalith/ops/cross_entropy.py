"""Cross-entropy and other sums of token losses without materialized logits, chunk by chunk of tokens.

The logits of a batch are by far the largest tensor of training (32 × 1024 tokens over 50,304 entries are 6.6 GB in
fp32). Here only one chunk's logits exist at a time. The gradient is computed in the forward pass, together with the
softmax; the backward pass scales it. This works for every loss that is a sum over tokens (`linear_token_losses`),
because its derivatives with respect to a token's log-probability and entropy need no other token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from megalith.comm.collectives import Axis
from megalith.errors import ConfigError
from megalith.ops import kernels as fused
from megalith.ops.compiled import as_one_kernel
from megalith.ops.loss_chunks import CHUNK_MULTIPLE, HeadGradients, loss_chunk_tokens
from megalith.ops.vocab_softmax import ORDINARY, HeadMath, logits_gradient, real_logits

FEW_LABELS = 0.75  # fraction of tokens with labels above which all tokens get logits
NO_LABEL = -1  # label of a sample that is excluded from classification


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

    Softmax and sums are in fp32. Rows of `weight` at or after vocab_size are padding and ignored. With `softcap` c,
    logits become c · tanh(logits / c) (Gemma 2). With an `axis`, `weight` is this rank's shard of rows, starting at row
    `first`. All shards have `rows` rows, except that the last ones may have fewer. The result is the same on every
    rank, and the gradient of hidden must be summed over ranks. The gradient is multiplied by `scale` before it is first
    rounded, so that an fp16 loss scale preserves small probabilities; the result is not multiplied. If
    `max_label_tokens` is small, logits of the other tokens are not computed.

    The gradient includes the z-loss z_loss_coeff · Σ loss_mask · (log Σ exp logits)² (Chowdhery et al. 2022, section
    5); the returned loss does not. With a coefficient, Σ loss_mask · (log Σ exp logits)² is added to `z_loss_sum`.
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
    """Return the sum of the token losses computed by `of`, a float32 scalar, and the log-probabilities and entropies of
    the targets.

    Log-probabilities and entropies equal the results of `linear_logprobs`, and have no gradient. Without `entropy`,
    `of` gets None for the entropies, and None is returned.

    The sum needs one pass with three matmuls, like `linear_cross_entropy`; `linear_logprobs` and its backward need
    four.
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
        losses, results = [], []
        factor = scale if wants_gradient and scale is not None else torch.ones((), device=hidden.device)
        gradients = HeadGradients(weight, bias, weight.requires_grad)
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
                    grad = logits_gradient(
                        logits, at, is_local, slopes[0][:, None], slopes[1], *softmax, of_sum
                    )
                del logits
            if wants_gradient:
                gradients.add(grad, x, matrix)
                del grad  # before the next chunk's is allocated
        if wants_gradient:
            ctx.save_for_backward(torch.cat(gradients.inputs), gradients.weight, gradients.bias)
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
    """Return the sum of the token losses, and its derivatives with respect to log-probabilities and entropies.

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
    """Check that a token loss function returned one loss per token, and return `losses`. Raises ConfigError."""
    if losses.shape != logprobs.shape:
        raise ConfigError(
            f"token_losses returned a tensor of shape {list(losses.shape)} for log-probabilities "
            f"of shape {list(logprobs.shape)}; return one loss per token"
        )
    return losses
