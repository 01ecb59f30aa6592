"""Log-probabilities and entropies without materialized logits, for losses over several tokens.

A loss over several tokens needs the log-probabilities of all of them before it has a gradient. The forward pass keeps
two numbers per token and the last chunk's logits; the backward pass computes the other chunks' logits again. Losses
that are sums over tokens need one pass (cross_entropy.py).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalith.comm.collectives import Axis
from megalith.ops.loss_chunks import HeadGradients, loss_chunk_tokens
from megalith.ops.vocab_softmax import ORDINARY, HeadMath, local_rows, logits_gradient, real_logits

# Logits that `linear_logprobs` keeps on a CPU for its backward pass. Elsewhere it keeps one chunk, as many as its
# backward pass has at once.
KEPT_ELEMENTS = 2**26


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

    Padding, softcap and `axis` are as in `linear_cross_entropy`; the softcap is applied before the temperature. Results
    are the same on every rank, and the gradient of hidden must be summed over ranks.
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
        matrix, added = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        gradients = HeadGradients(weight, bias, ctx.needs_input_grad[1])
        grad_logprobs = grad_logprobs / ctx.temperature
        whole = [hidden, index, grad_logprobs, log_sum]
        if entropy is not None:
            whole += [grad_entropy / ctx.temperature, entropy]
        chunks = [*zip(*(tensor.split(ctx.chunk) for tensor in whole))]
        for number in reversed(range(len(chunks))):
            x, targets, grad, log_sums, *entropy_parts = chunks[number]
            if (logits := ctx.kept.pop(number, None)) is None:
                logits = real_logits(x, matrix, targets, ctx.real, ctx.softcap, added)[0]
            row, is_local = local_rows(targets, logits.shape[1])
            by_entropy, entropies = entropy_parts or (None, None)
            softmax = (log_sums, entropies, ctx.temperature, ctx.softcap)
            product = logits_gradient(logits, row, is_local, grad, by_entropy, *softmax)
            gradients.add(product, x, matrix)
            del logits, product  # before the next chunk's are allocated
        return torch.cat(gradients.inputs[::-1]), gradients.weight, *[None] * 7, gradients.bias, None


def _first_kept(tokens: int, chunk: int, rows: int, device_type: str) -> int:
    """Return the index of the first chunk whose logits the forward pass keeps.

    The last chunk is always kept, and as many chunks before it as fit into KEPT_ELEMENTS.
    """
    count = -(-tokens // chunk)
    fit = KEPT_ELEMENTS // rows // chunk if device_type == "cpu" else 0
    return count - max(1, fit)
