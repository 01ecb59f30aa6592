"""The model: embedding, a loop over layers, a norm, and the output matmul or the loss.

One device's PyTorch, with nothing in it of how a run is spread over devices. Parameters are fp32; the embedding's
output is cast to the compute dtype, and every layer computes in the dtype it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from megalith.comm.collectives import local
from megalith.config import ModelConfig
from megalith.errors import ConfigError
from megalith.models.layer import TransformerLayer
from megalith.models.linear import Linear
from megalith.models.mtp import Future, with_further_losses
from megalith.models.norm import Norm
from megalith.models.pass_context import Context, KVCache, PassLayout, Runner, one_device, run_layers
from megalith.models.rope import local_rotary_tables, rotary_tables
from megalith.ops.attention_core import document_mask
from megalith.ops.cross_entropy import linear_cross_entropy, linear_logits
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

    `lookup` is a seam of tensor parallelism.
    """

    def __init__(self, config: ModelConfig, device: torch.device | None = None):
        super().__init__()
        width = config.hidden_size
        self.lookup = lookup
        self.word_embeddings = _table(config.padded_vocab_size, width, device)
        self.position_embeddings = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = _table(config.max_position_embeddings, width, device)

    def forward(self, input_ids: Tensor, position_ids: Tensor, context: Context) -> Tensor:
        """[batch, seq] -> [batch, seq, hidden]"""
        x = self.lookup(input_ids, local(self.word_embeddings.weight), context)
        if self.position_embeddings is not None:
            x = x + nn.functional.embedding(position_ids, local(self.position_embeddings.weight))
        return x


def _table(rows: int, width: int, device: torch.device | str | None) -> nn.Embedding:
    """An embedding without values: torch's own would draw some, from the global random state."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width, device=device), freeze=False)


def lookup(input_ids: Tensor, weight: Tensor, context: Context) -> Tensor:
    return nn.functional.embedding(input_ids, weight)


def every_token(x: Tensor, layout: PassLayout) -> Tensor:
    """What the residual stream here has of something that every token has: sequence parallelism gives its share."""
    return x


class Transformer(nn.Module):
    """A decoder-only language model of the shape that `config` gives.

    `compute_dtype` is that of the layers' arithmetic; `seed` keys dropout; without `causal` every token sees all others
    of its document. Parameters are made on `device` without
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
        causal: bool = True,
    ):
        super().__init__()
        self.config = config
        self.causal = causal
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
        # Seams: parallel/seams.py says what each is for.
        self.pass_layout = one_device
        self.runner: Runner = run_layers
        self.loss = sum_of_losses
        self.logits = all_logits
        self.attention_mask = document_mask
        self.shard_tokens = every_token
        self.has_adapters = False  # and everything else is frozen: see lora.py
        self.draws_dropout = config.hidden_dropout > 0 or config.attention_dropout > 0

    def forward(
        self,
        input_ids: Tensor,  # int64 [batch, seq]
        *,
        hidden: Tensor | None = None,  # [batch, seq, hidden]: of the stage before; None: this is the first
        labels: Tensor | None = None,  # int64 [batch, seq]
        loss_mask: Tensor | None = None,  # float32 [batch, seq]; None: every token counts
        position_ids: Tensor | None = None,  # int64 [batch, seq]; None: the places
        places: Tensor | None = None,  # int64 [seq]: each token's in the whole sequence; None: 0, 1, …
        document_ids: Tensor | None = None,  # int [batch, seq]: attention stays inside a document
        sample_numbers: Tensor | None = None,  # int64 [batch]: places in the run's stream, the key of dropout
        cache: KVCache | None = None,
        balance_scale: Tensor | None = None,  # float32 scalar: of the balancing losses' gradient; None: none
        future: Future | None = None,  # what further layers predict; None: they are left out
        loss_scale: Tensor | None = None,  # float32 scalar: the loss's gradient is made times this; None: 1
    ) -> Tensor:
        """Logits [batch, seq, vocab] in the compute dtype, or with labels the float32 sum of the tokens' losses.

        A pipeline stage that is not the last gives its hidden states. Raises ConfigError for more tokens than there
        are learned positions.
        """
        layout = self.pass_layout(input_ids.numel(), trains=labels is not None, has_places=places is not None)
        if places is None:
            past = cache.length if cache is not None else 0
            _check_positions(self.config, past + input_ids.shape[1])
            places = torch.arange(past, past + input_ids.shape[1], device=input_ids.device)
        if position_ids is None:
            position_ids = places.expand(input_ids.shape)
        context = self.context(position_ids, places, document_ids, sample_numbers, cache, layout)
        context.balance_scale = balance_scale
        x = self.embed(input_ids, position_ids, context) if hidden is None else hidden
        further = self.config.further_layers
        x = self.runner([layer for layer in self.layers.values() if layer.number not in further], x, context)
        if cache is not None:
            cache.length += input_ids.shape[1]
        if self.final_layernorm is None:
            return x
        x = self.final_layernorm(x)
        if labels is None:
            return self.logits(x, self.output_weight, *self._vocabulary, context)
        if loss_mask is None:
            loss_mask = torch.ones_like(labels, dtype=torch.float32)
        loss = self.loss(x, self.output_weight, labels, loss_mask, *self._vocabulary, context, loss_scale)
        if future is None:
            return loss
        return self._with_future(loss, x, future, position_ids, context, loss_scale)

    @property
    def _vocabulary(self) -> tuple[int, float | None]:
        return self.config.vocab_size, self.config.final_logit_softcapping

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
            x = self.runner([self.layers[number]], x, told)
            labels, loss_mask = future.labels[k], future.loss_mask[k]
            sizes = self._vocabulary
            losses.append(self.loss(x, self.output_weight, labels, loss_mask, *sizes, context, scales[k]))
        return with_further_losses(loss, sum(losses))

    def embed(self, input_ids: Tensor, position_ids: Tensor, context: Context) -> Tensor:
        """The tokens' rows, in the compute dtype, after dropout: [batch, seq, hidden]."""
        position_ids = self.shard_tokens(position_ids, context.layout)
        x = self.embedding(input_ids, position_ids, context).to(self.compute_dtype)
        if self.config.scale_embeddings:  # rounded to the compute dtype, as Gemma's own code does
            x = x * torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype).item()
        if context.dropout is None or self.config.hidden_dropout == 0:
            return x
        rows = context.dropout.stream_rows(EMBEDDING_OUTPUT)
        return counter_dropout(x, self.config.hidden_dropout, rows, context.dropout.columns)

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
        layout: PassLayout = PassLayout(),  # noqa: B008 (immutable)
    ) -> Context:
        """What the layers need to know of these tokens."""
        batch, seq = position_ids.shape
        context = Context(batch, layout, self.causal, cache=cache)
        if self.config.position_embedding_type == "rope":
            past = cache.length if cache is not None else 0
            length = (past + seq) * layout.sequence_parts
            context.rotary = rotary_tables(self.config, position_ids, length)
            if self.config.rotary_base_local is not None:
                context.rotary_local = local_rotary_tables(self.config, position_ids)
        if self.config.num_experts:
            sequences = torch.arange(batch, device=places.device)
            numbers = places[None] * batch + sequences[:, None]
            context.numbers = self.shard_tokens(numbers, layout).flatten()
        if document_ids is not None:
            context.mask = self.attention_mask(document_ids, self.causal)
        elif cache is not None and cache.length and seq > 1:
            keys = torch.arange(cache.length + seq, device=places.device)
            context.mask = (keys <= places[:, None])[None, None]
        if self.training and self.draws_dropout:
            if sample_numbers is None:
                sample_numbers = torch.arange(batch, device=places.device)
            keys = token_keys(self.seed, sample_numbers, places)
            count = self.config.num_layers + len(self.config.further_layers)
            layers = torch.arange(-1, count, dtype=torch.int32, device=keys.device)
            context.layers = layers[1:]
            columns = column_keys(self.config.hidden_size, keys.device)
            stream = self.shard_tokens(keys, layout)
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


def sum_of_losses(
    x: Tensor,  # [batch, seq, hidden]
    weight: Tensor,  # [padded vocab, hidden]
    labels: Tensor,  # int64 [batch, seq]
    loss_mask: Tensor,  # float32 [batch, seq]
    vocab_size: int,
    softcap: float | None,
    context: Context,
    scale: Tensor | None = None,  # float32 scalar: of the gradient; None: 1
) -> Tensor:
    return linear_cross_entropy(x, weight, labels, loss_mask, vocab_size, softcap, scale)


def all_logits(x: Tensor, weight: Tensor, vocab_size: int, softcap: float | None, context: Context) -> Tensor:
    return linear_logits(x, weight[:vocab_size], softcap)
