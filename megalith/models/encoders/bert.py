"""BERT (Devlin et al. 2019): a bidirectional encoder, trained to predict masked tokens.

    x      = stack(word + position + tokentype embedding)
    logits = norm(activation(dense(x))) · word_embeddingsᵀ + bias
    order  = binary_head(tanh(pooler(x of each sequence's first token)))

loss_mask is 0 except at the masked tokens. The binary head predicts whether a sample's two segments are in order: next
sentence prediction or sentence order (Lan et al. 2020), depending on the samples. Its loss is added to the loss of the
masked tokens, as in Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megalith.config import ModelConfig
from megalith.local_shards import local
from megalith.models.inputs import LossInputs, TokenInputs
from megalith.models.linear import Linear
from megalith.models.lm_head import LMHead
from megalith.models.loss import CrossEntropy, MicroBatchMean, scale_gradient
from megalith.models.pass_context import Context
from megalith.models.transformer import Stack, Transformer
from megalith.ops.cross_entropy import NO_LABEL

if TYPE_CHECKING:
    from megalith.data.batch import Batch


class Encodings(NamedTuple):
    """Outputs of an encoder."""

    hidden: Tensor  # [batch, seq, hidden]
    pooled: Tensor | None  # [batch, hidden], from each first token; None without a pooler
    order: Tensor | None  # logits [batch, 2]: in order, swapped; None without a binary head


class Bert(Transformer):
    """An encoder with the heads that `config` names. The heads are None in pipeline stages other than the last."""

    reads = ("tokentype_ids", "sentence_order", "order_weights")
    heads = ("output_layer", "lm_head", "pooler", "binary_head")

    def __init__(self, config: ModelConfig, *, device: torch.device | str | None = None, **how):
        super().__init__(config, device=device, causal=False, **how)
        size = config.hidden_size
        self.lm_head = LMHead(config, device) if config.add_lm_head else None
        self.pooler = Linear(size, size, bias=True, device=device) if config.pooler else None
        self.binary_head = Linear(size, 2, bias=True, device=device) if config.bert_binary_head else None

    def forward(
        self,
        input_ids: Tensor,
        *,
        tokentype_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        token_inputs: TokenInputs | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        sentence_order: Tensor | None = None,
        order_weights: Tensor | None = None,
        loss_inputs: LossInputs | None = None,
        streams: Mapping[str, Tensor] | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Return logits, or with labels the loss of the masked tokens and of the sentence order.

        Args:
            input_ids: int64 [batch, seq].
            tokentype_ids: int64 [batch, seq], each token's segment; None means all 0.
            padding_mask: bool [batch, seq], False for padding; None means the padding of `token_inputs`.
            token_inputs, labels, loss_mask, loss_inputs, streams: see Transformer.forward.
            sentence_order: int64 [batch], 0 in order, 1 swapped, NO_LABEL for neither; None means no such loss.
            order_weights: float32 [batch], weight of each sample's order loss; None means the losses are averaged.

        Returns:
            Logits [batch, seq, vocab], or the loss if there are labels. Without an LM head, hidden states [batch, seq,
            hidden] in both cases.
        """
        token_inputs = (token_inputs or TokenInputs()).with_padding_mask(padding_mask)
        loss_inputs = loss_inputs or LossInputs()
        context = self.context(input_ids, token_inputs, trains=labels is not None)
        context.balance_scale = loss_inputs.balance_scale
        context.max_label_tokens = loss_inputs.max_label_tokens
        x = self._embed(input_ids, tokentype_ids, context) if streams is None else streams["hidden"]
        x = Stack.forward(self, x, context)
        if self.final_layernorm is None:
            return {"hidden": x}
        if self.lm_head is None:
            return x
        h = self.lm_head(x, context)
        if labels is None:
            return self.vocabulary_logits(h, context)
        loss = self.vocabulary_loss(h, context, labels, loss_mask, loss_inputs)
        if self.binary_head is None or sentence_order is None:
            return loss
        token_index = token_inputs.token_index
        order_logits = self.binary_head(self._pooled(x, context, token_index))
        loss_of_order = order_loss(order_logits, sentence_order, order_weights)
        if token_index is not None:  # with context parallelism one rank has the first tokens
            loss_of_order = loss_of_order * (token_index == 0).any()
        return loss + scale_gradient(loss_of_order, loss_inputs.loss_scale)

    def encodings(
        self,
        input_ids: Tensor,
        tokentype_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        token_inputs: TokenInputs | None = None,
    ) -> Encodings:
        """Return hidden states, pooled first tokens and order logits. The arguments are those of `forward`."""
        token_inputs = (token_inputs or TokenInputs()).with_padding_mask(padding_mask)
        context = self.context(input_ids, token_inputs, trains=False)
        x = Stack.forward(self, self._embed(input_ids, tokentype_ids, context), context)
        pooled = None if self.pooler is None else self._pooled(x, context, token_inputs.token_index)
        return Encodings(x, pooled, None if self.binary_head is None else self.binary_head(pooled))

    def _embed(self, input_ids: Tensor, tokentype_ids: Tensor | None, context: Context) -> Tensor:
        """Return the embedding's output [batch, seq, hidden]."""
        if tokentype_ids is None:
            tokentype_ids = torch.zeros_like(input_ids)
        return self.embed(input_ids, context, tokentype_ids)

    def _pooled(self, x: Tensor, context: Context, token_index: Tensor | None) -> Tensor:
        """Return the pooled first token of each sequence, [batch, hidden], from the residual stream x.

        With context parallelism, ranks without the first tokens pool zeros.
        """
        if token_index is None:
            token_index = torch.arange(context.position_ids.shape[1], device=x.device)
        rows = torch.arange(context.batch, device=x.device)[:, None]  # [batch, 1]
        row_of_first = torch.where(token_index == 0, rows, -1)  # [batch, seq]
        is_first = self.shard_sequence(row_of_first, context.layout).flatten() == rows  # [batch, tokens here]
        first = x.flatten(0, -2)[is_first.int().argmax(1)] * is_first.any(1, keepdim=True)
        return torch.tanh(self.pooler(self.reduce_sequence(first, context.layout)))

    @property
    def output_bias(self) -> Tensor:
        return local(self.lm_head.vocabulary.bias)


class BertCrossEntropy(CrossEntropy):
    """Mean cross-entropy over the masked tokens of the step, plus the sentence order loss.

    The weight of a sample's order loss is its number of masked tokens.
    """

    def with_weights(self, batch: Batch, weights: Tensor) -> Batch:
        return replace(super().with_weights(batch, weights), order_weights=batch.loss_mask.sum(1))


class BertMicroBatchMean(MicroBatchMean):
    """The mean over micro-batches of (mean over masked tokens + mean over the samples' order losses).

    The logged loss is the same mean, as in Megatron-LM's pretrain_bert.py.
    """

    def logged_weight(self, batch: Batch) -> float | None:
        return None

    def with_weights(self, batch: Batch, weights: Tensor) -> Batch:
        return replace(super().with_weights(batch, weights), order_weights=mean_weights(batch.sentence_order))


def order_loss(logits: Tensor, order: Tensor, weights: Tensor | None) -> Tensor:
    """Return Σ weights · cross-entropy of logits [batch, 2] against order int64 [batch], a float32 scalar.

    Samples without an order (NO_LABEL) do not count.
    """
    losses = cross_entropy(logits.float(), order, ignore_index=NO_LABEL, reduction="none")
    return (losses * (mean_weights(order) if weights is None else weights)).sum()


def mean_weights(order: Tensor) -> Tensor:
    """Return float32 weights [batch] for the mean over the samples that have an order."""
    valid = (order != NO_LABEL).float()
    return valid / valid.sum().clamp(min=1)
