"""Lookup, loss and logits over a vocabulary that is sharded over the tensor axis.

Each rank has ⌈rows / tp⌉ consecutive rows of the padded embedding and of the output matrix; the last ranks have fewer
if tp does not divide the rows. The padding is the model's own and never depends on the axis. A token's embedding comes
from one rank, and the others add zeros. In the loss no rank has a full row of logits (ops/vocab_softmax.py).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from megalith.comm.collectives import all_gather_replicated
from megalith.models.loss import Objective, compute_logprobs, cross_entropy_sum
from megalith.models.pass_context import Context
from megalith.ops.vocab_softmax import ORDINARY, HeadMath, linear_logits, local_rows, softcapped
from megalith.parallel.tensor.tensor_parallel import TensorParallel


class VocabParallel:
    """Lookup, loss and logits over a vocabulary that is sharded over the tensor axis."""

    def __init__(self, tensor: TensorParallel, padded_vocab: int):
        self.tensor, self.axis = tensor, tensor.axis
        self.rows = -(-padded_vocab // self.axis.size)  # per rank; the last ranks may have fewer
        self.first = self.axis.rank * self.rows
        self.shard = dict(axis=self.axis, first=self.first, rows=self.rows)

    def lookup(self, input_ids: Tensor, weight: Tensor, context: Context) -> Tensor:
        """Return the embeddings [batch, seq, hidden], under SP [1, tokens / tp, hidden], summed over the ranks."""
        tokens = self.tensor.to_sp_order(input_ids, context.layout)
        index, here = local_rows(tokens - self.first, weight.shape[0])
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
        *,
        bias: Tensor | None = None,
        math: HeadMath = ORDINARY,
    ) -> Tensor:
        """Compute `cross_entropy_sum` from this rank's rows of the weight. The result is the same on every rank."""
        labels, loss_mask = (self.tensor.to_sp_order(x, context.layout) for x in (labels, loss_mask))
        hidden = self.tensor.gather(hidden, context)
        of_tokens = labels, loss_mask, vocab_size, softcap, context, scale
        return cross_entropy_sum(hidden, weight, *of_tokens, bias=bias, math=math, **self.shard)

    def logprobs(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        softcap: float | None,
        context: Context,
        objective: Objective,
        scale: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        math: HeadMath = ORDINARY,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute `models.loss.compute_logprobs`. The result is the same on every rank, in the order of the
        sequences.

        Log-probabilities are [batch, seq], or [batch, seq, k] for k targets per token, and entropies [batch, seq].
        """
        layout = context.layout
        shard = dict(self.shard, bias=bias, math=math)
        tokens = {name: self.tensor.to_sp_order(x, layout) for name, x in objective.tokens.items()}
        hidden, targets = self.tensor.gather(hidden, context), self.tensor.to_sp_order(targets, layout)
        *outputs, loss = compute_logprobs(
            objective, hidden, weight, targets, tokens, vocab_size, softcap, scale, **shard
        )
        ordered = [
            None if x is None else self.tensor.from_sp_order(x, layout, context.batch) for x in outputs
        ]
        return ordered[0], ordered[1], loss

    def logits(
        self,
        x: Tensor,
        weight: Tensor,
        vocab_size: int,
        softcap: float | None,
        context: Context,
        *,
        bias: Tensor | None = None,
        math: HeadMath = ORDINARY,
    ) -> Tensor:
        """Return logits [batch, seq, vocab] on every rank, without the vocabulary's padding."""
        shard = linear_logits(
            self.tensor.gather(x, context), weight, bias=bias, math=math
        )  # [..., local rows]
        shard = F.pad(shard, (0, self.rows - shard.shape[-1]))
        logits = all_gather_replicated(shard, self.axis, -1)[..., :vocab_size]
        return softcapped(logits.reshape(context.batch, -1, vocab_size), softcap)
