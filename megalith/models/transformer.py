"""The model: embedding, a loop over layers, a norm, and the output matmul or the loss.

One device's PyTorch, with nothing in it of how a run is spread over devices. Parameters are fp32; the embedding's
output is cast to the compute dtype, and every layer computes in the dtype it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megalith.comm.collectives import local
from megalith.config import ModelConfig
from megalith.errors import ConfigError
from megalith.models.cache import KVCache
from megalith.models.layer import TransformerLayer
from megalith.models.linear import Linear
from megalith.models.mtp import Future, with_further_losses
from megalith.models.norm import Norm
from megalith.models.pass_context import Context
from megalith.models.rope import local_rotary_tables, rotary_tables
from megalith.ops.attention_core import document_mask
from megalith.ops.cross_entropy import linear_cross_entropy, softcapped
from megalith.ops.dropout import (
    EMBEDDING_OUTPUT,
    DropoutKeys,
    column_keys,
    counter_dropout,
    output_rows,
    token_keys,
)


class Embedding(nn.Module):
    """Rows of word_embeddings, plus those of position_embeddings where positions are learned.

    `lookup` and `shard_tokens` are seams of tensor and sequence parallelism.
    """

    def __init__(self, config: ModelConfig, device: torch.device | None = None):
        super().__init__()
        width = config.hidden_size
        self.lookup = nn.functional.embedding
        self.shard_tokens = whole
        self.word_embeddings = _table(config.padded_vocab_size, width, device)
        self.position_embeddings = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = _table(config.max_position_embeddings, width, device)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor
    ) -> Tensor:  # [batch, seq] -> [batch, seq, hidden]
        x = self.lookup(input_ids, local(self.word_embeddings.weight))
        if self.position_embeddings is not None:
            position_ids = self.shard_tokens(position_ids)
            x = x + nn.functional.embedding(position_ids, local(self.position_embeddings.weight))
        return x


def _table(rows: int, width: int, device: torch.device | str | None) -> nn.Embedding:
    """An embedding without values: torch's own would draw some, from the global random state."""
    return nn.utils.skip_init(nn.Embedding, rows, width, device=device or torch.get_default_device())


def whole(x: Tensor) -> Tensor:
    """Every token: what sequence parallelism replaces by its share."""
    return x


class Transformer(nn.Module):
    """A decoder-only language model of the shape that `config` gives.

    `compute_dtype` is that of the layers' arithmetic; `seed` keys dropout. Parameters are made on `device` without
    values: `megalith.models.init.initialize` gives them, or a checkpoint does. A pipeline stage is a Transformer
    whose embedding, final_layernorm or some layers have been taken away; the last one keeps the word embedding where
    it is the output matrix too.
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
        numbers = [*range(config.num_layers), *config.further_layers]
        self.layers = nn.ModuleDict(
            {str(number): TransformerLayer(config, number, device) for number in numbers}
        )
        self.final_layernorm = Norm(config, config.hidden_size, device)
        self.output_layer = None
        if config.untie_embeddings_and_output_weights:
            self.output_layer = Linear(
                config.hidden_size, config.padded_vocab_size, bias=False, device=device
            )
        # Seams, each replaced from outside by the axis that needs it.
        self.loss = linear_cross_entropy
        self.logits = linear_logits
        self.attention_mask = document_mask
        self.shard_tokens = whole
        self.sequence_parts = 1  # in how many parts each sequence is cut
        self.has_adapters = False  # and everything else is frozen: see lora.py
        self.draws_dropout = config.hidden_dropout > 0 or config.attention_dropout > 0

    def forward(
        self,
        input_ids: Tensor,  # int64 [batch, seq]
        *,
        hidden: Tensor
        | None = None,  # [batch, seq, hidden]: the output of the stage before; None: this is the first
        labels: Tensor | None = None,  # int64 [batch, seq]
        loss_mask: Tensor | None = None,  # float32 [batch, seq]; None: every token counts
        position_ids: Tensor | None = None,  # int64 [batch, seq]; None: the places
        places: Tensor
        | None = None,  # int64 [seq]: where each token stands in the whole sequence; None: 0, 1, …
        document_ids: Tensor | None = None,  # int [batch, seq]: attention stays inside a document
        sample_numbers: Tensor | None = None,  # int64 [batch]: places in the run's stream, the key of dropout
        cache: KVCache | None = None,
        balance_scale: Tensor
        | None = None,  # float32 scalar: of the gradient of the experts' balancing losses; None: none
        future: Future | None = None,  # what further layers predict; None: they are left out
        loss_scale: Tensor | None = None,  # float32 scalar: the loss's gradient is made times this; None: 1
    ) -> Tensor:
        """Logits [batch, seq, vocab] in the compute dtype, or with labels the float32 sum of the tokens' losses.

        A pipeline stage that is not the last gives its hidden states. Raises ConfigError for more tokens than there
        are learned positions.
        """
        if places is None:
            past = cache.length if cache is not None else 0
            _check_positions(self.config, past + input_ids.shape[1])
            places = torch.arange(past, past + input_ids.shape[1], device=input_ids.device)
        if position_ids is None:
            position_ids = places.expand(input_ids.shape)
        context = self.context(position_ids, places, document_ids, sample_numbers, cache)
        context.balance_scale = balance_scale
        x = self.embed(input_ids, position_ids, context) if hidden is None else hidden
        further = {str(number) for number in self.config.further_layers}
        x = self.run_layers([number for number in self.layers if number not in further], x, context)
        if cache is not None:
            cache.length += input_ids.shape[1]
        if self.final_layernorm is None:
            return x
        x = self.final_layernorm(x)
        if labels is None:
            return self.logits(
                x,
                self.output_weight,
                context.batch,
                self.config.vocab_size,
                self.config.final_logit_softcapping,
            )
        if loss_mask is None:
            loss_mask = torch.ones_like(labels, dtype=torch.float32)
        vocab_size, softcap = self.config.vocab_size, self.config.final_logit_softcapping
        loss = self.loss(x, self.output_weight, labels, loss_mask, vocab_size, softcap, loss_scale)
        if future is None:
            return loss
        return self._with_future(loss, x, future, position_ids, context, loss_scale)

    def _with_future(
        self,
        loss: Tensor,
        x: Tensor,
        future: Future,
        position_ids: Tensor,
        context: Context,
        scale: Tensor | None,
    ) -> Tensor:
        """`loss` with the gradient of the further layers' losses; x [batch, seq, hidden] is what the head has read."""
        losses, factor = [], self.config.mtp_loss_scaling_factor / len(self.config.further_layers)
        scale = torch.full((), factor, device=x.device) if scale is None else scale * factor
        scales = (scale * future.weights).expand(len(self.config.further_layers))
        for k, number in enumerate(map(str, self.config.further_layers)):
            told = replace(context, upcoming=self.embed(future.tokens[k], position_ids, context))
            x = self.run_layers([number], x, told)
            sizes = (self.config.vocab_size, self.config.final_logit_softcapping, scales[k])
            losses.append(self.loss(x, self.output_weight, future.labels[k], future.loss_mask[k], *sizes))
        return with_further_losses(loss, sum(losses))

    def embed(self, input_ids: Tensor, position_ids: Tensor, context: Context) -> Tensor:
        """The tokens' rows, in the compute dtype, after dropout: [batch, seq, hidden]."""
        x = self.embedding(input_ids, position_ids).to(self.compute_dtype)
        if self.config.scale_embeddings:  # rounded to the compute dtype, as Gemma's own code does
            x = x * torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype).item()
        if context.dropout is None or self.config.hidden_dropout == 0:
            return x
        return counter_dropout(
            x,
            self.config.hidden_dropout,
            context.dropout.stream_rows(EMBEDDING_OUTPUT),
            context.dropout.columns,
        )

    def run_layers(self, numbers: Sequence[str], x: Tensor, context: Context) -> Tensor:
        """x [batch, seq, hidden] through the layers with these numbers; recomputation wraps this."""
        for number in numbers:
            x = self.layers[number](x, context.at_layer(int(number)))
        return x

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Transformer:
        """What `.float()`, `.bfloat16()`, `.to(dtype)` and `.to(device)` call: a dtype is the compute dtype too."""
        super()._apply(fn, recurse)
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        return self

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    @property
    def output_weight(self) -> Tensor:
        """The output matrix [padded vocab, hidden]: the embedding's own where they are tied."""
        return local(self.output_layer.weight if self.output_layer else self.embedding.word_embeddings.weight)

    def context(
        self,
        position_ids: Tensor,
        places: Tensor,
        document_ids: Tensor | None,
        sample_numbers: Tensor | None,
        cache: KVCache | None,
    ) -> Context:
        """What the layers need to know of these tokens."""
        batch, seq = position_ids.shape
        context = Context(batch, cache=cache)
        if self.config.position_embedding_type == "rope":
            past = cache.length if cache is not None else 0
            length = (past + seq) * self.sequence_parts
            context.rotary = rotary_tables(self.config, position_ids, length)
            if self.config.rotary_base_local is not None:
                context.rotary_local = local_rotary_tables(self.config, position_ids)
        if self.config.num_experts:
            sequences = torch.arange(batch, device=places.device)
            numbers = places[None] * batch + sequences[:, None]
            context.numbers = self.shard_tokens(numbers).flatten()
        if document_ids is not None:
            context.mask = self.attention_mask(document_ids)
        elif cache is not None and cache.length and seq > 1:
            keys = torch.arange(cache.length + seq, device=places.device)
            context.mask = (keys <= places[:, None])[None, None]
        if self.training and self.draws_dropout:
            if sample_numbers is None:
                sample_numbers = torch.arange(batch, device=places.device)
            keys = token_keys(self.seed, sample_numbers, places)
            layers = torch.arange(
                -1,
                self.config.num_layers + len(self.config.further_layers),
                dtype=torch.int32,
                device=keys.device,
            )
            context.layers = layers[1:]
            columns = column_keys(self.config.hidden_size, keys.device)
            stream = self.shard_tokens(keys)
            context.output_rows = output_rows(stream, context.layers)
            context.dropout = DropoutKeys(keys, stream, columns, layers[0])
        return context


def _check_positions(config: ModelConfig, length: int) -> None:
    longest = config.max_position_embeddings
    if config.position_embedding_type == "learned_absolute" and length > longest:
        raise ConfigError(
            f"{length} tokens are more than the {longest} learned positions of the model "
            "(model.max_position_embeddings); shorten the input"
        )


def linear_logits(
    x: Tensor, weight: Tensor, batch: int, vocab_size: int, softcap: float | None = None
) -> Tensor:
    """Logits [batch, seq, vocab] from x [batch, seq, hidden] and the output matrix, its padding left out.

    With `softcap` c they are c · tanh(logits / c).
    """
    return softcapped(nn.functional.linear(x, weight.to(x.dtype)[:vocab_size]), softcap)
