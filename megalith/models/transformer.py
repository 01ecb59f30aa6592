"""The model: embedding, a loop over layers, a norm, and the output matmul or the loss.

One device's PyTorch, with nothing in it of how a run is spread over devices. Parameters are fp32; the embedding's
output is cast to the compute dtype, and every layer computes in the dtype it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from megalith.comm.collectives import local
from megalith.config import ModelConfig
from megalith.models.layer import normed
from megalith.models.linear import Linear
from megalith.models.loss import Objective, ask_logprobs
from megalith.models.mixers import MakeMixer, make_mixer
from megalith.models.mtp import Future, with_further_losses
from megalith.models.norm import Norm
from megalith.models.pass_context import Context, Encoded
from megalith.models.stack import Stack
from megalith.ops.cross_entropy import linear_cross_entropy, linear_logits
from megalith.ops.dropout import EMBEDDING_OUTPUT, counter_dropout


class Embedding(nn.Module):
    """Rows of word_embeddings, plus those of position_embeddings where positions are learned, and perhaps a norm.

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
        self.layernorm = Norm(config, width, device) if config.embedding_layernorm else None

    def forward(self, input_ids: Tensor, position_ids: Tensor, context: Context) -> Tensor:
        """int64 [batch, seq], and the stream's share of its positions -> the stream [batch, seq, hidden]"""
        x = self.lookup(input_ids, local(self.word_embeddings.weight), context)
        if self.position_embeddings is not None:
            x = x + nn.functional.embedding(position_ids, local(self.position_embeddings.weight))
        return normed(self.layernorm, x)


def _table(rows: int, width: int, device: torch.device | str | None) -> nn.Embedding:
    """An embedding without values: torch's own would draw some, from the global random state."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width, device=device), freeze=False)


def lookup(input_ids: Tensor, weight: Tensor, context: Context) -> Tensor:
    return nn.functional.embedding(input_ids, weight)


class Transformer(Stack):
    """A language model of the shape that `config` gives: a stack with an embedding before it and a vocabulary behind.

    `compute_dtype` is that of the layers' arithmetic; `numbers` are its layers', by default all. Parameters get values
    from `megalith.models.init.initialize` or a checkpoint. A pipeline stage is a Transformer whose embedding,
    final_layernorm or some layers have been taken away; the last one keeps the word embedding where it is the output
    matrix too.
    """

    streams: ClassVar[Mapping[str, str]] = {"hidden": "input_ids"}
    """What a stage gives the next: the residual streams, and the tensor of the batch that has the tokens of each."""
    reads: ClassVar[Sequence[str]] = ()
    """Tensors of the batch that `forward` takes by these names, besides those that every batch has."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        numbers: Iterable[int] | None = None,
        compute_dtype: torch.dtype = torch.float32,
        seed: int = 0,
        device: torch.device | str | None = None,
        causal: bool = True,
        cross: bool = False,
        mixer: MakeMixer = make_mixer,
    ):
        numbers = [*(range(config.num_layers) if numbers is None else numbers), *config.further_layers]
        kinds = dict(causal=causal, cross=cross, mixer=mixer)
        super().__init__(
            config, numbers, seed=seed, device=device, embedding=Embedding(config, device), **kinds
        )
        self.compute_dtype = compute_dtype
        self.output_layer = None
        if config.untie_embeddings_and_output_weights:
            self.output_layer = Linear(
                config.hidden_size, config.padded_vocab_size, bias=False, device=device
            )
        # Seams: parallel/seams.py says what each is for.
        self.loss = sum_of_losses
        self.logprobs = target_logprobs
        self.logits = all_logits
        self.has_adapters = False  # and everything else is frozen: see lora.py

    def forward(
        self,
        input_ids: Tensor,  # int64 [batch, seq]
        *,
        streams: Mapping[str, Tensor] | None = None,  # of the stage before; None: this is the first
        labels: Tensor | None = None,  # int64 [batch, seq], or what an objective asks for: [batch, seq, k]
        loss_mask: Tensor | None = None,  # float32 [batch, seq]; None: every token counts
        objective: Objective | None = None,  # of the labels' log-probabilities; None: −their sum by loss_mask
        position_ids: Tensor | None = None,  # int64 [batch, seq]; None: the places
        places: Tensor | None = None,  # int64 [seq]: each token's in the whole sequence; None: 0, 1, …
        document_ends: Tensor
        | None = None,  # int32 [batch, documents] (ops/documents.py): attention stays inside
        padding_mask: Tensor | None = None,  # bool [batch, seq], False for what fills up; None: nothing does
        sample_numbers: Tensor | None = None,  # int64 [batch]: places in the run's stream, the key of dropout
        encoded: Encoded | None = None,  # what cross-attention attends to
        balance_scale: Tensor | None = None,  # float32 scalar: of the balancing losses' gradient; None: none
        future: Future | None = None,  # what further layers predict; None: they are left out
        loss_scale: Tensor | None = None,  # float32 scalar: the loss's gradient is made times this; None: 1
    ) -> Tensor | dict[str, Tensor]:
        """Logits [batch, seq, vocab] in the compute dtype, or with labels the loss: a float32 scalar.

        A pipeline stage that is not the last gives its `streams`. Raises ConfigError for more tokens than there
        are learned positions.
        """
        context = self.context(
            input_ids,
            trains=labels is not None,
            position_ids=position_ids,
            places=places,
            document_ends=document_ends,
            padding_mask=padding_mask,
            sample_numbers=sample_numbers,
        )
        context.balance_scale, context.encoded = balance_scale, encoded
        x = self.embed(input_ids, context) if streams is None else streams["hidden"]
        x = super().forward(x, context)  # [batch, seq, hidden]
        if self.final_layernorm is None:
            return {"hidden": x}
        if labels is None:
            return self.logits(x, self.output_weight, *self._vocabulary, context)
        if objective is not None:
            sizes = self._vocabulary
            found = self.logprobs(x, self.output_weight, labels, *sizes, context, objective, loss_scale)
            loss = objective.loss(*found, loss_scale)
        else:
            if loss_mask is None:
                loss_mask = torch.ones_like(labels, dtype=torch.float32)
            loss = self.loss(x, self.output_weight, labels, loss_mask, *self._vocabulary, context, loss_scale)
        if future is None:
            return loss
        return self._with_future(loss, x, future, context, loss_scale)

    @property
    def _vocabulary(self) -> tuple[int, float | None]:
        return self.config.vocab_size, self.config.final_logit_softcapping

    def _with_future(
        self,
        loss: Tensor,
        x: Tensor,
        future: Future,
        context: Context,
        scale: Tensor | None,
    ) -> Tensor:
        """`loss` with the gradient of the further layers' losses; x [batch, seq, hidden] is what the head has read."""
        losses, factor = [], self.config.mtp_loss_scaling_factor / len(self.config.further_layers)
        scale = torch.full((), factor, device=x.device) if scale is None else scale * factor
        scales = (scale * future.weights).expand(len(self.config.further_layers))
        for k, number in enumerate(map(str, self.config.further_layers)):
            told = replace(context, upcoming=self.embed(future.tokens[k], context))
            x = self.runner([self.layers[number]], x, told)
            labels, loss_mask = future.labels[k], future.loss_mask[k]
            sizes = self._vocabulary
            losses.append(self.loss(x, self.output_weight, labels, loss_mask, *sizes, context, scales[k]))
        return with_further_losses(loss, sum(losses))

    def embed(self, input_ids: Tensor, context: Context) -> Tensor:
        """The tokens' rows, in the compute dtype, after dropout: [batch, seq, hidden]."""
        position_ids = self.shard_tokens(context.position_ids, context.layout)
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


def target_logprobs(
    x: Tensor,  # [batch, seq, hidden]
    weight: Tensor,  # [padded vocab, hidden]
    targets: Tensor,  # int64 [batch, seq] or [batch, seq, k]
    vocab_size: int,
    softcap: float | None,
    context: Context,
    objective: Objective,
    scale: Tensor | None = None,  # float32 scalar: of the gradient of its losses; None: 1
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return ask_logprobs(objective, x, weight, targets, objective.tokens, vocab_size, softcap, scale)


def all_logits(x: Tensor, weight: Tensor, vocab_size: int, softcap: float | None, context: Context) -> Tensor:
    return linear_logits(x, weight[:vocab_size], softcap)
