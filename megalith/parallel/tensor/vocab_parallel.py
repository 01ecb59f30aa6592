"""The vocabulary cut over the tensor axis: lookup, loss and logits.

Each rank holds a run of rows of the padded embedding and of the output matrix: ⌈rows / tp⌉ of them, the last ranks
fewer where that does not come out even. The padding is the model's own and never depends on the axis. A token's row is
found by one rank and the others add zeros. For the loss no rank ever sees a whole row of logits (ops/cross_entropy.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from megalith.comm.collectives import all_gather_alike
from megalith.models.pass_context import Context
from megalith.ops.cross_entropy import linear_cross_entropy, linear_logits, softcapped

if TYPE_CHECKING:
    from megalith.parallel.tensor.tensor_parallel import TensorParallel


class VocabParallel:
    """The seams of Embedding and Transformer over the vocabulary, for one rank of the axis."""

    def __init__(self, tensor: TensorParallel, padded_vocab: int):
        self.tensor, self.axis = tensor, tensor.axis
        self.rows = -(-padded_vocab // self.axis.size)  # of a full rank
        self.first = self.axis.rank * self.rows

    def lookup(self, input_ids: Tensor, weight: Tensor, context: Context) -> Tensor:
        """The tokens' rows [batch, seq, hidden], with SP [1, tokens / tp, hidden]: a sum, as each rank has its own."""
        index, here = self._own(self.tensor.in_shares(input_ids, context.layout), weight)
        return self.tensor.reduce(F.embedding(index, weight) * here[..., None], context)

    def loss(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        vocab_size: int,
        softcap: float | None,
        context: Context,
        scale: Tensor | None = None,
    ) -> Tensor:
        """As `megalith.ops.cross_entropy.linear_cross_entropy`, the same on every rank; weight [rows here, hidden]."""
        labels, loss_mask = (self.tensor.in_shares(x, context.layout) for x in (labels, loss_mask))
        shard = dict(axis=self.axis, first=self.first, rows=self.rows)
        hidden = self.tensor.gather(hidden, context)
        return linear_cross_entropy(hidden, weight, labels, loss_mask, vocab_size, softcap, scale, **shard)

    def logits(
        self, x: Tensor, weight: Tensor, vocab_size: int, softcap: float | None, context: Context
    ) -> Tensor:
        """Logits [batch, seq, vocab] of every entry, on every rank, their padding left out."""
        part = linear_logits(self.tensor.gather(x, context), weight)  # [..., rows here]
        part = F.pad(part, (0, self.rows - part.shape[-1]))
        logits = all_gather_alike(part, self.axis, -1)[..., :vocab_size]
        return softcapped(logits.reshape(context.batch, -1, vocab_size), softcap)

    def _own(self, tokens: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the tokens in this rank's shard, 0 for those held elsewhere, and which ones are here."""
        index = tokens - self.first
        here = (index >= 0) & (index < weight.shape[0])
        return torch.where(here, index, 0), here
