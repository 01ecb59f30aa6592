"""The loss of a language model without its logits: output matmul and cross-entropy, chunk by chunk.

The logits of a batch are the largest tensor of training by far (32 × 1024 tokens over 50,304 entries are 6.6 GB in
fp32). Here a chunk of tokens at a time goes through matmul, softmax and its gradient, so only a chunk's logits ever
exist. The gradient is made in the forward pass, where the softmax is at hand; the backward pass scales it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = {"cpu": 2**22, "cuda": 2**26}  # logits that exist at once


def linear_cross_entropy(
    hidden: Tensor,  # [..., hidden]
    weight: Tensor,  # [padded vocab, hidden], any float type; cast to hidden's
    labels: Tensor,  # int64 [...], each < vocab_size
    loss_mask: Tensor,  # float32 [...]: the weight of each token
    vocab_size: int,
) -> Tensor:
    """Σ over tokens of loss_mask · −log softmax(hidden · weightᵀ)[label]: a float32 scalar.

    Rows of `weight` from vocab_size on are padding and take no part. Softmax and sums are in fp32.
    """
    if (
        not torch.is_grad_enabled()
    ):  # an autograd function still sees a parameter as one that needs a gradient
        hidden, weight = hidden.detach(), weight.detach()
    return _LinearCrossEntropy.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), loss_mask.reshape(-1), vocab_size
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, labels: Tensor, loss_mask: Tensor, vocab_size: int
    ) -> Tensor:
        matrix = weight.to(hidden.dtype)
        loss = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if hidden.requires_grad else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if weight.requires_grad else None
        rows = max(1, CHUNK_ELEMENTS[hidden.device.type] // weight.shape[0])
        for chunk, label, mask, start in zip(
            hidden.split(rows), labels.split(rows), loss_mask.split(rows), range(0, len(hidden), rows)
        ):
            logits = (chunk @ matrix.T).float()  # [rows, padded vocab]
            logits[:, vocab_size:] = float("-inf")
            log_sum = logits.logsumexp(-1)  # [rows]
            loss += ((log_sum - logits.gather(1, label[:, None])[:, 0]) * mask).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            grad = logits.sub_(log_sum[:, None]).exp_()  # softmax [rows, padded vocab]
            grad.scatter_add_(1, label[:, None], grad.new_full((), -1.0).expand(len(label), 1))
            grad = grad.mul_(mask[:, None]).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[start : start + rows] = grad @ matrix
            if grad_weight is not None:
                grad_weight += grad.T @ chunk
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad_loss.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = grad_weight * grad_loss
        return grad_hidden, grad_weight, None, None, None
