"""BERT (Devlin et al. 2019): an encoder whose tokens all see each other, trained by tokens that were masked.

    x      = stack(word + position + tokentype embedding)
    logits = norm(activation(dense(x))) · word_embeddingsᵀ + bias
    order  = binary_head(tanh(pooler(x of each sequence's first token)))

Labels stand at the masked tokens, loss_mask is 0 elsewhere. The binary head tells whether a sample's two segments are
in order: next-sentence prediction, or sentence order (Lan et al. 2020), whichever the samples are made for. Its loss is
added to that of the masked tokens, as Megatron-LM adds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megalith.config import ModelConfig
from megalith.local_shards import local
from megalith.models.linear import Linear
from megalith.models.loss import CrossEntropy, MicroBatchMean, Objective, scale_gradient
from megalith.models.norm import Norm
from megalith.models.pass_context import Context
from megalith.models.transformer import Stack, Transformer
from megalith.models.vocabulary import VocabularyBias
from megalith.ops.activation import ACTIVATIONS
from megalith.ops.cross_entropy import NO_LABEL

if TYPE_CHECKING:
    from megalith.data.batch import Batch

OF_TOKENS = (
    "position_ids",
    "token_index",
    "document_ends",
    "padding_mask",
    "sample_numbers",
)  # what `context` takes


class LMHead(nn.Module):
    """What stands before the output matrix, and the bias behind it."""

    def __init__(self, config: ModelConfig, device: torch.device | None = None):
        super().__init__()
        self.activation = ACTIVATIONS[config.head_activation]
        self.dense = Linear(config.hidden_size, config.hidden_size, bias=True, device=device)
        self.layernorm = Norm(config, config.hidden_size, device)
        self.vocabulary = VocabularyBias(config, device)

    def forward(self, x: Tensor, context: Context) -> Tensor:  # [batch, seq, hidden]
        return self.layernorm(self.dense(x, context, then=self.activation))


class Encodings(NamedTuple):
    """What a model makes of some sequences."""

    hidden: Tensor  # [batch, seq, hidden]
    pooled: Tensor | None  # [batch, hidden], of the first tokens; None: it has no pooler
    order: Tensor | None  # logits [batch, 2]: in order, or not; None: it has no binary head


class Bert(Transformer):
    """An encoder with the heads that `config` names. In a pipeline stage that is not the last they are None."""

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
        input_ids: Tensor,  # int64 [batch, seq]
        *,
        tokentype_ids: Tensor | None = None,  # int64 [batch, seq]; None: all are of segment 0
        streams: Mapping[str, Tensor] | None = None,
        labels: Tensor | None = None,  # int64 [batch, seq]
        loss_mask: Tensor | None = None,  # float32 [batch, seq]
        sentence_order: Tensor
        | None = None,  # int64 [batch], 0: in order, 1: not, NO_LABEL; None: no loss of it
        order_weights: Tensor | None = None,  # float32 [batch]; None: the mean of those with a label
        objective: Objective | None = None,
        loss_scale: Tensor | None = None,
        **tokens,
    ) -> Tensor | dict[str, Tensor]:
        """Logits [batch, seq, vocab], or with labels the loss: that of the masked tokens, and of the segments' order
        where that is given. Without an LM head the hidden states. All other arguments are those of
        Transformer.forward."""
        x, context = self._hidden(input_ids, tokentype_ids, streams, labels is not None, tokens)
        if self.final_layernorm is None:
            return {"hidden": x}
        if self.lm_head is None:
            return x
        h = self.lm_head(x, context)
        if labels is None:
            return self.vocabulary_logits(h, context)
        loss = self.vocabulary_loss(h, context, labels, loss_mask, objective, loss_scale)
        if self.binary_head is None or sentence_order is None:
            return loss
        token_index = tokens.get("token_index")
        order = self.binary_head(self._pooled(x, context, token_index))
        of_order = order_loss(order, sentence_order, order_weights)
        if token_index is not None:  # of context parallelism's ranks one has the first tokens
            of_order = of_order * (token_index == 0).any()
        return loss + scale_gradient(of_order, loss_scale)

    def encodings(
        self, input_ids: Tensor, tokentype_ids: Tensor | None = None, **tokens: Tensor | None
    ) -> Encodings:
        """Of int64 [batch, seq], which are taken as `forward` takes them."""
        x, context = self._hidden(input_ids, tokentype_ids, None, False, tokens)
        pooled = None if self.pooler is None else self._pooled(x, context, tokens.get("token_index"))
        return Encodings(x, pooled, None if self.binary_head is None else self.binary_head(pooled))

    def _hidden(
        self,
        input_ids: Tensor,
        tokentype_ids: Tensor | None,
        streams: Mapping[str, Tensor] | None,
        trains: bool,
        tokens: Mapping[str, Tensor | None],
    ) -> tuple[Tensor, Context]:
        """What the stack gives: the residual stream [batch, seq, hidden]."""
        context = self.context(input_ids, trains=trains, **{name: tokens.get(name) for name in OF_TOKENS})
        context.balance_scale, context.max_label_tokens = (
            tokens.get("balance_scale"),
            tokens.get("max_label_tokens"),
        )
        if streams is not None:
            return Stack.forward(self, streams["hidden"], context), context
        if tokentype_ids is None:
            tokentype_ids = torch.zeros_like(input_ids)
        return Stack.forward(self, self.embed(input_ids, context, tokentype_ids), context), context

    def _pooled(self, x: Tensor, context: Context, token_index: Tensor | None) -> Tensor:
        """Of each sequence's first token in the residual stream x: [batch, hidden]. Where context parallelism has put
        it on another rank, of zeros."""
        if token_index is None:
            token_index = torch.arange(context.position_ids.shape[1], device=x.device)
        numbers = torch.arange(context.batch, device=x.device)[:, None]  # [batch, 1]
        firsts = torch.where(token_index == 0, numbers, -1)  # [batch, seq]
        found = (
            self.shard_sequence(firsts, context.layout).flatten() == numbers
        )  # [batch, tokens of the stream]
        first = x.flatten(0, -2)[found.int().argmax(1)] * found.any(1, keepdim=True)
        return torch.tanh(self.pooler(self.reduce_sequence(first, context.layout)))

    @property
    def output_bias(self) -> Tensor:
        return local(self.lm_head.vocabulary.bias)


class BertCrossEntropy(CrossEntropy):
    """The mean over the masked tokens of the step; a sample's order counts as often as its masked tokens."""

    def given(self, batch: Batch, weights: Tensor) -> Batch:
        return replace(super().given(batch, weights), order_weights=batch.loss_mask.sum(1))


class BertMicroBatchMean(MicroBatchMean):
    """The mean over the step's micro-batches of the mean over the masked tokens + the mean over the samples' orders.

    Megatron-LM's pretrain_bert.py logs this mean as it is.
    """

    def logged_weight(self, batch: Batch) -> float | None:
        return None

    def given(self, batch: Batch, weights: Tensor) -> Batch:
        return replace(super().given(batch, weights), order_weights=mean_weights(batch.sentence_order))


def order_loss(logits: Tensor, order: Tensor, weights: Tensor | None) -> Tensor:
    """Σ weights · cross-entropy of logits [batch, 2] against order [batch], where there is one; a float32 scalar."""
    losses = cross_entropy(logits.float(), order, ignore_index=NO_LABEL, reduction="none")
    return (losses * (mean_weights(order) if weights is None else weights)).sum()


def mean_weights(order: Tensor) -> Tensor:
    """float32 [batch] that make a sum the mean over the samples that have an order."""
    valid = (order != NO_LABEL).float()
    return valid / valid.sum().clamp(min=1)
