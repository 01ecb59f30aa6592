"""The vocabulary cut over the tensor axis: lookup, loss and logits.

Each rank holds a run of rows of the padded embedding and of the output matrix: ⌈rows / tp⌉ of them, the last ranks
fewer where that does not come out even. The padding is the model's own and never depends on the axis. A token's row is
found by one rank and the others add zeros. For the loss no rank ever sees a whole row of logits: three numbers a token
are exchanged, the largest logit (a MAX all-reduce), and the sum of exponentials and the label's logit (a SUM).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from megalith.comm import Axis, all_gather_alike, summed
from megalith.ops.cross_entropy import CHUNK_ELEMENTS


class VocabParallel:
    """The seams of Embedding and Transformer over the vocabulary, for one rank of the axis.

    `whole` gives all tokens of the residual stream, and sums the gradients of the ranks that use them.
    """

    def __init__(self, whole: Callable[[Tensor], Tensor], axis: Axis, padded_vocab: int):
        self.whole = whole
        self.axis = axis
        self.rows = -(-padded_vocab // axis.size)  # of a full rank
        self.first = axis.rank * self.rows

    def lookup(self, input_ids: Tensor, weight: Tensor) -> Tensor:
        """This rank's part of the tokens' rows [batch, seq, hidden], to be summed: zeros for rows held elsewhere."""
        index, here = self._own(input_ids, weight)
        return F.embedding(index, weight) * here[..., None]

    def loss(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, loss_mask: Tensor, vocab_size: int
    ) -> Tensor:
        """As `megalith.ops.cross_entropy.linear_cross_entropy`, the same on every rank; weight [rows here, hidden]."""
        hidden = self.whole(hidden)
        index, here = self._own(labels.reshape(-1), weight)
        return _VocabParallelCrossEntropy.apply(
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            index,
            here,
            loss_mask.reshape(-1),
            max(0, vocab_size - self.first),
            max(1, CHUNK_ELEMENTS[hidden.device.type] // self.rows),  # the same on every rank
            self.axis,
        )

    def logits(self, x: Tensor, weight: Tensor, batch: int, vocab_size: int) -> Tensor:
        """Logits [batch, seq, vocab] of every entry, on every rank, their padding left out."""
        x = self.whole(x)
        part = F.linear(x, weight.to(x.dtype))  # [..., rows here]
        part = F.pad(part, (0, self.rows - part.shape[-1]))
        logits = all_gather_alike(part, self.axis, -1)[..., :vocab_size]
        return logits.reshape(batch, -1, vocab_size)

    def _own(self, tokens: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the tokens in this rank's shard, 0 for those held elsewhere, and which ones are here."""
        index = tokens - self.first
        here = (index >= 0) & (index < weight.shape[0])
        return torch.where(here, index, 0), here


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """The gradient is made in the forward pass, where the softmax is at hand, a chunk of tokens at a time.

    That of `hidden` is this rank's part of a sum, which `whole` adds up in the backward pass.
    """

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,  # [tokens, hidden]
        weight: Tensor,  # [rows here, hidden], any float type; cast to hidden's
        index: Tensor,  # int64 [tokens]: the label's row here
        here: Tensor,  # bool [tokens]: whether it is
        loss_mask: Tensor,  # float32 [tokens]
        real: int,  # rows from here on are padding
        chunk: int,  # tokens
        axis: Axis,
    ) -> Tensor:
        with_gradient = hidden.requires_grad or weight.requires_grad
        matrix = weight.to(hidden.dtype)
        losses, grads_hidden = [], []
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if with_gradient else None
        parts = (x.split(chunk) for x in (hidden, index, here, loss_mask))
        for x, row, own, mask in zip(*parts):
            logits = (x @ matrix.T).float()  # [chunk, rows here]
            logits[:, real:] = float("-inf")
            logits -= summed(logits.amax(-1), axis, "max")[:, None]
            label = logits.gather(1, row[:, None])[:, 0]
            exponentials = logits.exp_()
            sums = torch.stack([exponentials.sum(-1), torch.where(own, label, 0.0)])
            total, label = summed(sums, axis)
            losses.append(((total.log() - label) * mask).sum())
            if with_gradient:
                grad = exponentials.div_(total[:, None])  # softmax
                grad.scatter_add_(1, row[:, None], -own[:, None].float())
                grad = grad.mul_(mask[:, None]).to(hidden.dtype)
                grads_hidden.append(grad @ matrix)
                grad_weight += grad.T @ x
        if with_gradient:
            ctx.save_for_backward(torch.cat(grads_hidden), grad_weight)
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        grad_hidden = grad_hidden * grad_loss.to(grad_hidden.dtype)
        return grad_hidden, grad_weight * grad_loss, *[None] * 6
