"""The loss of a language model without its logits: output matmul and cross-entropy, chunk by chunk.

The logits of a batch are the largest tensor of training by far (32 × 1024 tokens over 50,304 entries are 6.6 GB in
fp32). Here a chunk of tokens at a time goes through matmul, softmax and its gradient, so only a chunk's logits ever
exist. The gradient is made in the forward pass, where the softmax is at hand; the backward pass scales it.

The vocabulary may be cut over ranks. A chunk's logits are then those of a rank's own entries, and two numbers a token
are exchanged: the log of the sum of exponentials (a MAX and a SUM all-reduce put the ranks' together) and the label's
logit, which one rank has.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from megalith.comm.collectives import Axis, summed
from megalith.ops import kernels as fused
from megalith.ops.compiled import as_one_kernel

# Logits that exist at once. On an H200 the GEMMs of 3,328 tokens with GPT-2's vocabulary leave no SM idle:
# with 2,560 tokens the gradient's takes a quarter more time.
CHUNK_ELEMENTS = {"cpu": 2**22, "cuda": 5 * 2**25}
CHUNK_MULTIPLE = 256  # tokens; matmuls like round numbers


def linear_cross_entropy(
    hidden: Tensor,  # [..., hidden]
    weight: Tensor,  # [padded vocab, hidden], any float type; cast to hidden's
    labels: Tensor,  # int64 [...], each < vocab_size
    loss_mask: Tensor,  # float32 [...]: the weight of each token
    vocab_size: int,
    softcap: float | None = None,
    scale: Tensor | None = None,  # float32 scalar: of the gradient; None: 1
    *,
    axis: Axis = Axis(),  # noqa: B008 (immutable)
    first: int = 0,
    rows: int | None = None,
) -> Tensor:
    """Σ over tokens of loss_mask · −log softmax(hidden · weightᵀ)[label]: a float32 scalar.

    With `softcap` c the softmax is that of c · tanh(logits / c) (Gemma 2).
    Rows of `weight` from vocab_size on are padding and take no part. Softmax and sums are in fp32. Over an `axis`,
    `weight` is a rank's run of rows from `first` on, of `rows` on a full rank; the result is the same on every rank,
    and the gradient of hidden a part of a sum. The gradient is made times `scale` before it is rounded for the first
    time, so that in fp16 a loss scale keeps small probabilities; the result is without it.
    """
    if (
        not torch.is_grad_enabled()
    ):  # an autograd function still sees a parameter as one that needs a gradient
        hidden, weight = hidden.detach(), weight.detach()
    tokens = CHUNK_ELEMENTS[hidden.device.type] // (rows or weight.shape[0])
    return _LinearCrossEntropy.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1) - first,
        loss_mask.reshape(-1),
        max(0, vocab_size - first),
        max(1, tokens - tokens % CHUNK_MULTIPLE if tokens > CHUNK_MULTIPLE else tokens),
        softcap,
        axis,
        scale,
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,  # [tokens, hidden]
        weight: Tensor,  # [rows, hidden]
        index: Tensor,  # int64 [tokens]: the label's row in weight; outside of it where another rank has it
        loss_mask: Tensor,  # float32 [tokens]
        real: int,  # rows from here on are padding
        chunk: int,  # tokens
        softcap: float | None,
        axis: Axis,
        scale: Tensor | None,
    ) -> Tensor:
        matrix = weight.to(hidden.dtype)
        wants_gradient = hidden.requires_grad or weight.requires_grad
        fuses = fused.AVAILABLE and hidden.is_cuda and wants_gradient and axis.size == 1 and softcap is None
        losses, grads = [], []
        factor = scale if wants_gradient and scale is not None else torch.ones((), device=hidden.device)
        loss_mask = loss_mask * factor
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if weight.requires_grad else None
        for x, row, mask in zip(*(t.split(chunk) for t in (hidden, index, loss_mask))):
            logits = x @ matrix.T  # [chunk, rows]
            if fuses:
                losses.append(fused.softmax_loss_(logits, row, mask, real).sum())
                grad = logits
            else:
                loss, grad = _loss_and_gradient(logits, row, mask, real, softcap, axis, wants_gradient)
                losses.append(loss)
            if wants_gradient:
                grads.append(grad @ matrix)
                if grad_weight is not None:  # else the matrix is frozen
                    grad_weight = _add_matmul(grad_weight, grad.T, x)
        if wants_gradient:
            ctx.save_for_backward(torch.cat(grads), grad_weight)
        return torch.stack(losses).sum() / factor

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        grad_weight = None if grad_weight is None else grad_weight * grad_loss
        # in fp32: rounded to a short type, the factor would put what is below the head off from the head's gradient
        grad_hidden = as_one_kernel(_scaled, grad_hidden, grad_loss)
        return grad_hidden, grad_weight, *[None] * 7


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    return (x.float() * factor).to(x.dtype)


def _loss_and_gradient(
    logits: Tensor,  # [tokens, rows], used up
    index: Tensor,  # int64 [tokens]
    mask: Tensor,  # float32 [tokens]
    real: int,
    softcap: float | None,
    axis: Axis,
    wants_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """The sum of the tokens' losses, and its gradient with respect to the logits before they are softcapped."""
    logits = softcapped(logits, softcap)
    logits[:, real:] = float("-inf")
    own = (index >= 0) & (index < logits.shape[1])
    row = index.clamp(0, logits.shape[1] - 1)[:, None]
    log_sum, label = _whole(*as_one_kernel(_log_sum_and_label, logits, row), own, axis)
    loss = ((log_sum - label) * mask).sum()
    if not wants_gradient:
        return loss, None
    grad = as_one_kernel(_weighted_softmax, logits, log_sum, mask)
    grad.scatter_add_(1, row, -(mask * own)[:, None].to(grad.dtype))
    return loss, grad if softcap is None else grad * _softcap_slope(logits, softcap)


def linear_logits(hidden: Tensor, weight: Tensor, softcap: float | None = None) -> Tensor:
    """Logits [..., rows] of hidden [..., hidden] by rows of the output matrix, softcapped."""
    return softcapped(F.linear(hidden, weight.to(hidden.dtype)), softcap)


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap · tanh(logits / softcap); None: the logits as they are."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _softcap_slope(logits: Tensor, softcap: float) -> Tensor:
    """The derivative of `softcapped` where it gave these logits; 0 where they are -inf, as padding is."""
    return 1 - (logits.clamp(min=-softcap) / softcap).square()


def _log_sum_and_label(logits: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """log Σ exp of each row of logits [tokens, rows], and its entry at row [tokens, 1]: float32 [tokens]."""
    return logits.float().logsumexp(-1), logits.gather(1, row)[:, 0].float()


def _weighted_softmax(logits: Tensor, log_sum: Tensor, mask: Tensor) -> Tensor:
    """mask · exp(logits − log_sum) in the type of logits [tokens, rows]."""
    return ((logits.float() - log_sum[:, None]).exp() * mask[:, None]).to(logits.dtype)


def _whole(log_sum: Tensor, label: Tensor, own: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Both over the whole vocabulary, from each rank's part of it; `own` where the label is this rank's."""
    if axis.size == 1:
        return log_sum, label
    largest = summed(log_sum, axis, "max")
    total, label = summed(torch.stack([(log_sum - largest).exp(), torch.where(own, label, 0.0)]), axis)
    return largest + total.log(), label


def _add_matmul(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Adds a · b to total, float32. On a GPU the matmul itself adds, and nothing is rounded to the type of a and b."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return total.add_(a @ b)
