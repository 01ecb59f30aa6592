"""The model: embedding, a loop over layers, a norm, and the output matmul or the loss.

One device's PyTorch, with nothing in it of how a run is spread over devices. Parameters are fp32; the embedding's
output is cast to the compute dtype, and every layer computes in the dtype it is given.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megalith.comm import local
from megalith.config import ModelConfig
from megalith.models.attention import SelfAttention
from megalith.models.cache import KVCache
from megalith.models.context import Context
from megalith.models.linear import Linear
from megalith.models.mlp import MLP
from megalith.models.norm import Norm
from megalith.models.rope import rotary_tables
from megalith.ops.attention import document_mask
from megalith.ops.cross_entropy import linear_cross_entropy
from megalith.ops.dropout import (
    ATTENTION_OUTPUT,
    EMBEDDING_OUTPUT,
    MLP_OUTPUT,
    DropoutKeys,
    counter_dropout,
    token_keys,
)


class Embedding(nn.Module):
    """Rows of word_embeddings, plus those of position_embeddings where positions are learned."""

    def __init__(self, config: ModelConfig, device: torch.device | None = None):
        super().__init__()
        width = config.hidden_size
        self.word_embeddings = nn.Embedding(config.padded_vocab_size, width, device=device)
        self.position_embeddings = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, width, device=device)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor
    ) -> Tensor:  # [batch, seq] -> [batch, seq, hidden]
        x = nn.functional.embedding(input_ids, local(self.word_embeddings.weight))
        if self.position_embeddings is not None:
            x = x + nn.functional.embedding(position_ids, local(self.position_embeddings.weight))
        return x


class TransformerLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream (pre-norm)."""

    def __init__(self, config: ModelConfig, number: int, device: torch.device | None = None):
        super().__init__()
        self.dropout = config.hidden_dropout
        self.input_layernorm = Norm(config, config.hidden_size, device)
        self.self_attention = SelfAttention(config, number, device)
        self.pre_mlp_layernorm = Norm(config, config.hidden_size, device)
        self.mlp = MLP(config, device)

    def forward(self, x: Tensor, context: Context) -> Tensor:  # [batch, seq, hidden]
        x = x + self._drop(self.self_attention(self.input_layernorm(x), context), context, ATTENTION_OUTPUT)
        return x + self._drop(self.mlp(self.pre_mlp_layernorm(x)), context, MLP_OUTPUT)

    def _drop(self, x: Tensor, context: Context, site: int) -> Tensor:
        if context.dropout is None or self.dropout == 0:
            return x
        return counter_dropout(x, self.dropout, context.dropout.rows(site))


class Transformer(nn.Module):
    """A decoder-only language model of the shape that `config` gives.

    `compute_dtype` is that of the layers' arithmetic; `seed` keys dropout. Parameters are made on `device` without
    values: `megalith.models.init.initialize` gives them, or a checkpoint does.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        compute_dtype: torch.dtype = torch.float32,
        seed: int = 0,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.seed = seed
        self.embedding = Embedding(config, device)
        self.layers = nn.ModuleDict(
            {str(number): TransformerLayer(config, number, device) for number in range(config.num_layers)}
        )
        self.final_layernorm = Norm(config, config.hidden_size, device)
        self.output_layer = None
        if config.untie_embeddings_and_output_weights:
            self.output_layer = Linear(
                config.hidden_size, config.padded_vocab_size, bias=False, device=device
            )
        self.loss = linear_cross_entropy

    def forward(
        self,
        input_ids: Tensor,  # int64 [batch, seq]
        *,
        labels: Tensor | None = None,  # int64 [batch, seq]
        loss_mask: Tensor | None = None,  # float32 [batch, seq]; None: every token counts
        position_ids: Tensor | None = None,  # int64 [batch, seq]; None: 0, 1, 2, …
        document_ids: Tensor | None = None,  # int [batch, seq]: attention stays inside a document
        sample_numbers: Tensor | None = None,  # int64 [batch]: places in the run's stream, the key of dropout
        cache: KVCache | None = None,
    ) -> Tensor:
        """Logits [batch, seq, vocab] in the compute dtype, or with labels the float32 sum of the tokens' losses."""
        context, position_ids = self._context(input_ids, position_ids, document_ids, sample_numbers, cache)
        x = self._embed(input_ids, position_ids, context)  # [batch, seq, hidden]
        x = self.run_layers(list(self.layers), x, context)
        if cache is not None:
            cache.length += input_ids.shape[1]
        x = self.final_layernorm(x)
        if labels is None:
            return nn.functional.linear(x, self.output_weight.to(x.dtype)[: self.config.vocab_size])
        if loss_mask is None:
            loss_mask = torch.ones_like(labels, dtype=torch.float32)
        return self.loss(x, self.output_weight, labels, loss_mask, self.config.vocab_size)

    def run_layers(self, numbers: Sequence[str], x: Tensor, context: Context) -> Tensor:
        """x [batch, seq, hidden] through the layers with these numbers; recomputation wraps this."""
        for number in numbers:
            x = self.layers[number](x, context.at_layer(int(number)))
        return x

    @property
    def output_weight(self) -> Tensor:
        """The output matrix [padded vocab, hidden]: the embedding's own where they are tied."""
        return local(self.output_layer.weight if self.output_layer else self.embedding.word_embeddings.weight)

    def _embed(self, input_ids: Tensor, position_ids: Tensor, context: Context) -> Tensor:
        x = self.embedding(input_ids, position_ids).to(self.compute_dtype)
        if context.dropout is None or self.config.hidden_dropout == 0:
            return x
        return counter_dropout(x, self.config.hidden_dropout, context.dropout.rows(EMBEDDING_OUTPUT))

    def _context(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        document_ids: Tensor | None,
        sample_numbers: Tensor | None,
        cache: KVCache | None,
    ) -> tuple[Context, Tensor]:
        batch, seq = input_ids.shape
        past = cache.length if cache is not None else 0
        places = torch.arange(past, past + seq, device=input_ids.device)  # [seq]
        if position_ids is None:
            position_ids = places.expand(batch, seq)
        context = Context(cache=cache)
        if self.config.position_embedding_type == "rope":
            context.rotary = rotary_tables(self.config, position_ids)
        if document_ids is not None:
            context.mask = document_mask(document_ids)
        elif past and seq > 1:
            context.mask = (torch.arange(past + seq, device=places.device) <= places[:, None])[None, None]
        if self.training and (self.config.hidden_dropout or self.config.attention_dropout):
            if sample_numbers is None:
                sample_numbers = torch.arange(batch, device=input_ids.device)
            keys = token_keys(self.seed, sample_numbers, places)
            layers = torch.arange(-1, self.config.num_layers, dtype=torch.int32, device=keys.device)
            context.layers, context.dropout = layers[1:], DropoutKeys(keys, layers[0])
        return context, position_ids
