"""A model's embedding and output matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megalith.config import ModelConfig
from megalith.local_shards import local
from megalith.models.linear import Linear
from megalith.models.norm import Norm, norm_or_identity
from megalith.models.pass_context import Context
from megalith.models.sinusoids import Sinusoids

VOCABULARY = (
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    "vocabulary.bias",
    "lm_head.vocabulary.bias",
)
"""Parameters with one row per vocabulary entry, padded in memory."""


class WordEmbedding(nn.Embedding):
    """The word embedding's weight [padded vocab, hidden]. Some of its rows may be trained with adapters."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.adapter: nn.Module | None = None

    @property
    def matrix(self) -> Tensor:
        """Return this rank's shard of the weight with the trained rows in it."""
        return _with_trained_rows(self)


class PositionEmbedding(nn.Module):
    """Adds positions, learned or sinusoidal, to embedded words, then applies an optional norm."""

    def __init__(self, config: ModelConfig, device: torch.device | None = None):
        super().__init__()
        width = config.hidden_size
        self.position_embeddings = self.sinusoids = None
        if config.learns_positions:
            self.position_embeddings = _table(config.position_rows, width, device)
        elif config.adds_positions:
            self.sinusoids = Sinusoids.of_model(config)
        self.layernorm = Norm(config, width, device) if config.embedding_layernorm else None

    def forward(self, words: Tensor, position_ids: Tensor) -> Tensor:
        """Return the sum [batch, seq, hidden] of words [batch, seq, hidden] and positions int64 [batch, seq]."""
        return norm_or_identity(self.layernorm, self.add_positions(words, position_ids))

    def add_positions(self, x: Tensor, position_ids: Tensor) -> Tensor:
        if self.position_embeddings is not None:
            return x + nn.functional.embedding(position_ids, local(self.position_embeddings.weight))
        return x if self.sinusoids is None else x + self.sinusoids(position_ids).to(x.dtype)


class Embedding(PositionEmbedding):
    """Sum of the word embedding and, if the model has them, position and token type embeddings, then an optional norm.

    If positions are added, scale_embeddings scales only the word embedding. `lookup` is a seam of tensor parallelism.
    """

    def __init__(self, config: ModelConfig, device: torch.device | None = None):
        super().__init__(config, device)
        width = config.hidden_size
        self.lookup = lookup
        self.scale = width**0.5 if config.scale_embeddings and config.adds_positions else 1.0
        self.word_embeddings = _table(config.padded_vocab_size, width, device, WordEmbedding)
        self.tokentype_embeddings = _table(config.tokentypes, width, device) if config.tokentypes else None

    def keep_words_only(self) -> None:
        """Remove all but word_embeddings, on a last pipeline stage that uses them as output matrix or for MTP."""
        self.position_embeddings = self.sinusoids = self.tokentype_embeddings = self.layernorm = None

    def embed_words(self, input_ids: Tensor, context: Context) -> Tensor:
        """Return the scaled word embedding [batch, seq, hidden] of input_ids int64 [batch, seq]."""
        x = self.lookup(input_ids, self.word_embeddings.matrix, context)
        return x if self.scale == 1 else x * self.scale

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, context: Context, tokentype_ids: Tensor | None = None
    ) -> Tensor:
        """Return the residual stream [batch, seq, hidden] for input_ids int64 [batch, seq].

        With sequence parallelism, position_ids and tokentype_ids are this rank's shard, and the result is a shard too.
        """
        x = self.add_positions(self.embed_words(input_ids, context), position_ids)
        if self.tokentype_embeddings is not None:
            x = x + nn.functional.embedding(tokentype_ids, local(self.tokentype_embeddings.weight))
        return norm_or_identity(self.layernorm, x)


class LatePositionEmbedding(Embedding):
    """Embedding whose norm precedes the addition of positions (BlenderbotSmall's decoder)."""

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, context: Context, tokentype_ids: Tensor | None = None
    ) -> Tensor:
        words = norm_or_identity(self.layernorm, self.embed_words(input_ids, context))
        return self.add_positions(words, position_ids)


def make_embedding(config: ModelConfig, device: torch.device | None = None) -> Embedding:
    """Return a model's embedding; in an encoder-decoder, the decoder's."""
    kind = LatePositionEmbedding if config.decoder_positions_after_layernorm else Embedding
    return kind(config, device)


class OutputMatrix(Linear):
    """The output matrix as a module, so that data parallelism can gather it when it is needed."""

    @property
    def matrix(self) -> Tensor:
        """Return this rank's shard of the weight with the trained rows in it."""
        return _with_trained_rows(self)

    def forward(self, x: Tensor, function: Callable, *args):
        """Return function(x, matrix, *args)."""
        return function(x, self.matrix, *args)


def _with_trained_rows(module: WordEmbedding | OutputMatrix) -> Tensor:
    return local(module.weight) if module.adapter is None else module.adapter.matrix(module.weight)


class VocabularyBias(nn.Module):
    """Bias of the logits, float32 [padded vocab]. It is frozen without `train_output_bias`."""

    def __init__(self, config: ModelConfig, device: torch.device | None = None):
        super().__init__()
        bias = torch.empty(config.padded_vocab_size, device=device)
        self.bias = nn.Parameter(bias, requires_grad=config.train_output_bias)


def _table(
    rows: int, width: int, device: torch.device | str | None, kind: type[nn.Embedding] = nn.Embedding
) -> nn.Embedding:
    """Return an embedding without values; nn.Embedding would draw values from the global random state."""
    return kind.from_pretrained(torch.empty(rows, width, device=device), freeze=False)


def lookup(input_ids: Tensor, weight: Tensor, context: Context) -> Tensor:
    return nn.functional.embedding(input_ids, weight)
