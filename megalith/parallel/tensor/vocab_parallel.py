"""The vocabulary cut over the tensor axis: lookup, loss and logits.

Each rank holds a run of rows of the padded embedding and of the output matrix: ⌈rows / tp⌉ of them, the last ranks
fewer where that does not come out even. The padding is the model's own and never depends on the axis. A token's row is
found by one rank and the others add zeros. For the loss no rank ever sees a whole row of logits (ops/cross_entropy.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from megalith.comm.collectives import Axis, all_gather_alike
from megalith.ops.cross_entropy import linear_cross_entropy, softcapped


class VocabParallel:
    """The seams of Embedding and Transformer over the vocabulary, for one rank of the axis.

    `whole` gives all tokens of the residual stream, and sums the gradients of the ranks that use them; `in_shares`
    puts what every token has in the order of that stream.
    """

    def __init__(
        self,
        whole: Callable[[Tensor], Tensor],
        in_shares: Callable[[Tensor], Tensor],
        axis: Axis,
        padded_vocab: int,
    ):
        self.whole, self.in_shares = whole, in_shares
        self.axis = axis
        self.rows = -(-padded_vocab // axis.size)  # of a full rank
        self.first = axis.rank * self.rows

    def lookup(self, input_ids: Tensor, weight: Tensor) -> Tensor:
        """This rank's part of the tokens' rows [batch, seq, hidden], to be summed: zeros for rows held elsewhere."""
        index, here = self._own(self.in_shares(input_ids), weight)
        return F.embedding(index, weight) * here[..., None]

    def loss(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        vocab_size: int,
        softcap: float | None = None,
        scale: Tensor | None = None,
    ) -> Tensor:
        """As `megalith.ops.cross_entropy.linear_cross_entropy`, the same on every rank; weight [rows here, hidden]."""
        labels, loss_mask = self.in_shares(labels), self.in_shares(loss_mask)
        shard = dict(axis=self.axis, first=self.first, rows=self.rows)
        return linear_cross_entropy(
            self.whole(hidden), weight, labels, loss_mask, vocab_size, softcap, scale, **shard
        )

    def logits(
        self, x: Tensor, weight: Tensor, batch: int, vocab_size: int, softcap: float | None = None
    ) -> Tensor:
        """Logits [batch, seq, vocab] of every entry, on every rank, their padding left out."""
        x = self.whole(x)
        part = F.linear(x, weight.to(x.dtype))  # [..., rows here]
        part = F.pad(part, (0, self.rows - part.shape[-1]))
        logits = all_gather_alike(part, self.axis, -1)[..., :vocab_size]
        return softcapped(logits.reshape(batch, -1, vocab_size), softcap)

    def _own(self, tokens: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the tokens in this rank's shard, 0 for those held elsewhere, and which ones are here."""
        index = tokens - self.first
        here = (index >= 0) & (index < weight.shape[0])
        return torch.where(here, index, 0), here
