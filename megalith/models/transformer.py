"""The model: an embedding, a stack of layers, and the output matmul or the loss; one device's PyTorch.

A layer is mixers and a feed-forward half, each added to the residual stream. A mixer (mixers/) lets tokens see each
other, a second one those of another sequence; the feed-forward half, an MLP or experts, takes each by itself. A stack
is a list of layers and a norm, from hidden states to hidden states: an encoder, a decoder and all that has no
vocabulary is one. What its layers need to know of the tokens of a pass is made once, in `context`. Recomputation,
ping-pong micro-batches and offloaded activations are other runners of its list of layers than `run_layers`.

Nothing here knows how a run is spread over devices. Parameters are fp32; the embedding's output is cast to the compute
dtype, and every layer computes in the dtype it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from megalith.config import ModelConfig
from megalith.errors import ConfigError
from megalith.local_shards import local
from megalith.models.identity import identity
from megalith.models.linear import MLP
from megalith.models.loss import Objective, all_logits, cross_entropy_sum, target_logprobs
from megalith.models.mixers import MakeMixer, make_mixer
from megalith.models.mixers.attention import CrossAttention, RelativeBias
from megalith.models.moe import MoE
from megalith.models.mtp import MTPProjection, MTPTargets, add_mtp_losses
from megalith.models.norm import Norm, normed, normed_after
from megalith.models.pass_context import Context, Encoded, one_device
from megalith.models.rope import local_rotary_tables, rotary_tables
from megalith.models.runnable import Runnable, runnable
from megalith.models.vocabulary import Embedding, OutputMatrix, VocabularyBias
from megalith.ops.documents import (
    document_ids,
    mark_dynamic_documents,
    padding_attention_mask,
    same_document_mask,
)
from megalith.ops.dropout import (
    ATTENTION_OUTPUT,
    CROSS_ATTENTION_OUTPUT,
    EMBEDDING_OUTPUT,
    MLP_OUTPUT,
    DropoutKeys,
    Mask,
    column_keys,
    counter_dropout,
    output_rows,
    token_keys,
)
from megalith.ops.fused_norm import add


class TransformerLayer(Runnable):
    """x + mixer(norm(x)), then x + mlp(norm(x)): norms where `norm_placement` says, dropout before additions. With
    `cross` there is x + cross_attention(norm(x)) between them. With parallel_attn_mlp (Wang and Komatsuzaki 2021)
    x + mixer(norm(x)) + mlp(norm(x)), the norms two or one. With apply_residual_connection_post_layernorm every norm(x)
    takes the place of x, so that the stream is what the norm behind an addition gives (Vaswani et al. 2017)."""

    def __init__(
        self,
        config: ModelConfig,
        number: int,
        device: torch.device | None = None,
        *,
        cross: bool = False,
        mixer: MakeMixer = make_mixer,
    ):
        super().__init__()
        self.number = number
        self.dropout = config.hidden_dropout
        self.side_by_side = config.parallel_attn_mlp
        self.goes_on_normed = config.apply_residual_connection_post_layernorm
        self.multiplier = config.residual_multiplier

        def norm(*placements: str) -> Norm | None:
            wanted = config.norm_placement in placements
            return Norm(config, config.hidden_size, device) if wanted else None

        self.input_layernorm = norm("pre", "sandwich")
        self.self_attention = mixer(config, number, device)  # its name in checkpoints, whatever it is
        self.post_attention_layernorm = norm("post", "sandwich")
        self.pre_cross_attn_layernorm = self.cross_attention = self.post_cross_attn_layernorm = None
        if cross:
            self.pre_cross_attn_layernorm = norm("pre", "sandwich")
            self.cross_attention = CrossAttention(config, number, device)
            self.post_cross_attn_layernorm = norm("post", "sandwich")
        self.pre_mlp_layernorm = None if config.shared_layernorm else norm("pre", "sandwich")
        self.join = self.final_layernorm = None
        if number in config.mtp_layers:
            self.join, self.final_layernorm = (
                MTPProjection(config, device),
                Norm(config, config.hidden_size, device),
            )
        self.has_experts = number in config.expert_layers
        self.mlp = MoE(config, device) if self.has_experts else MLP(config, device)
        self.post_mlp_layernorm = norm("post", "sandwich")

    @runnable
    def forward(self, x: Tensor, context: Context) -> Tensor:  # [batch, seq, hidden]
        """Of several micro-batches, with a context each, a tuple: side by side in one graph."""
        if isinstance(x, tuple):
            return tuple(self.forward(*each) for each in zip(x, context, strict=True))
        if self.join is not None:
            x = self.join(x, context)
        x, h = self._normed_after(self.input_layernorm, x)
        y = self._added(self.post_attention_layernorm, self.self_attention(h, context))
        mask = self._mask(context, ATTENTION_OUTPUT)
        if self.side_by_side:
            h = h if self.pre_mlp_layernorm is None else self.pre_mlp_layernorm(x)
            x = add(add(x, y, mask), self._added(None, self.mlp(h, context)), self._mask(context, MLP_OUTPUT))
            return normed(self.final_layernorm, x)
        if self.cross_attention is not None:
            x, h = self._normed_after(self.pre_cross_attn_layernorm, x, y, mask)
            y = self._added(self.post_cross_attn_layernorm, self.cross_attention(h, context))
            mask = self._mask(context, CROSS_ATTENTION_OUTPUT)
        x, h = self._normed_after(self.pre_mlp_layernorm, x, y, mask)
        mask = self._mask(context, MLP_OUTPUT)
        if self.has_experts:  # they are no part of a graph, but what routes tokens to them is: see moe.py
            plan = self.mlp.plan(h, context)
            if mask is None and self.post_mlp_layernorm is None and self.multiplier == 1:
                return normed(self.final_layernorm, self.mlp(h, plan, context, x))
            y = self.mlp(h, plan, context)
        else:
            y = self.mlp(h, context)
        x = add(x, self._added(self.post_mlp_layernorm, y), mask)
        return normed(self.final_layernorm, x)

    def _normed_after(self, norm: Norm | None, x: Tensor, *added) -> tuple[Tensor, Tensor]:
        """The residual stream with what is `added`, and that normed: one and the same where the stream goes on so."""
        x, h = normed_after(norm, x, *added)
        return (h, h) if self.goes_on_normed else (x, h)

    def _added(self, norm: Norm | None, y: Tensor) -> Tensor:
        """What goes into the residual stream of what a half has given."""
        y = normed(norm, y)
        return y if self.multiplier == 1 else y * self.multiplier

    def _mask(self, context: Context, site: int) -> Mask | None:
        if context.dropout is None or self.dropout == 0:
            return None
        return Mask(self.dropout, context.dropout.output_rows(site), context.dropout.columns)

    @property
    def mixers(self) -> list[nn.Module]:
        return [self.self_attention] + ([] if self.cross_attention is None else [self.cross_attention])


PADDING = -1  # the document of tokens that fill up: they see each other alone, and nobody sees them


Runner = Callable[[Sequence[TransformerLayer], Tensor, Context], Tensor]


def run_layers(layers: Sequence[TransformerLayer], x: Tensor, context: Context) -> Tensor:
    """x [batch, seq, hidden] through these layers."""
    for layer in layers:
        x = layer(x, context.at_layer(layer.number))
    return x


class Stack(nn.Module):
    """The layers of these `numbers`, which no other stack of the model has, and the norm behind them.

    Without `causal` every token sees all others of its document; with `cross` every layer attends to
    `context.encoded` too; `mixer` makes a layer's own. `seed` keys dropout. An `embedding` stands before the layers
    for whoever has tokens. Parameters are made on `device` without values. In a pipeline stage some layers have been
    taken away, and the norm where it is another's.
    """

    def __init__(
        self,
        config: ModelConfig,
        numbers: Iterable[int],
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        causal: bool = True,
        cross: bool = False,
        mixer: MakeMixer = make_mixer,
        embedding: nn.Module | None = None,
    ):
        super().__init__()
        self.config, self.seed, self.causal = config, seed, causal
        self.embedding = embedding
        numbers = list(numbers)
        self.first_layer = numbers[0] if numbers else 0
        self.layers = nn.ModuleDict(
            {str(n): TransformerLayer(config, n, device, cross=cross, mixer=mixer) for n in numbers}
        )
        self.final_layernorm = Norm(config, config.hidden_size, device)
        self.relative_attention_bias = None
        if config.position_embedding_type == "relative":
            self.relative_attention_bias = RelativeBias(config, causal, device)
        self.draws_dropout = config.hidden_dropout > 0 or config.attention_dropout > 0
        # Seams: parallel/seams.py says what each is for.
        self.pass_layout = one_device
        self.runner: Runner = run_layers
        self.shard_sequence = identity
        self.reduce_sequence = identity

    def forward(self, x: Tensor, context: Context) -> Tensor:  # [batch, seq, hidden]
        further = self.config.mtp_layers
        x = self.runner([layer for layer in self.layers.values() if layer.number not in further], x, context)
        return normed(self.final_layernorm, x)

    def context(
        self,
        input_ids: Tensor,  # int64 [batch, seq], of which the shape matters alone
        *,
        trains: bool = True,  # whether a loss follows; else generation
        position_ids: Tensor | None = None,  # int64 [batch, seq]; None: token_index
        token_index: Tensor | None = None,  # int64 [seq]: each token's in the whole sequence; None: 0, 1, …
        document_ends: Tensor
        | None = None,  # int32 [batch, documents] (ops/documents.py): attention stays inside
        padding_mask: Tensor
        | None = None,  # bool [batch, seq], of whole sequences everywhere, False for what fills up; None: nothing does
        padding: Tensor | None = None,  # bool [batch, seq], as a Batch has it
        sample_numbers: Tensor | None = None,  # int64 [batch]: positions in the data stream; keys of dropout
    ) -> Context:
        """What the layers need to know of these tokens.

        Raises ConfigError for more tokens than there are learned positions.
        """
        (batch, seq), device = input_ids.shape, input_ids.device
        layout = self.pass_layout(input_ids.numel(), trains=trains, has_position_ids=token_index is not None)
        if token_index is None:
            _check_positions(self.config, seq)
            token_index = torch.arange(seq, device=device)
        if position_ids is None:
            position_ids = token_index.expand(batch, seq)
        context = Context(batch, layout, self.causal, position_ids=position_ids)
        if self.config.position_embedding_type == "rope":
            context.rotary = rotary_tables(self.config, position_ids, seq * layout.cp_size)
            if self.config.rotary_base_local is not None:
                context.rotary_local = local_rotary_tables(self.config, position_ids)
        if self.relative_attention_bias is not None and self.layers:  # a pipeline stage may have none
            context.bias = self.relative_attention_bias(token_index, layout)
        if self.config.num_experts:
            numbers = token_index[None] * batch + torch.arange(batch, device=device)[:, None]
            context.numbers = self.shard_sequence(numbers, layout).flatten()
        if padding_mask is not None:
            numbers = padding_mask.long() - 1  # PADDING, and document 0
            if document_ends is not None:
                numbers = document_ids(document_ends, padding_mask.shape[1]).masked_fill(
                    ~padding_mask, PADDING
                )
            context.mask = same_document_mask(numbers, numbers, self.causal)
        elif document_ends is not None:
            context.documents = mark_dynamic_documents(document_ends)
        elif padding is not None:
            context.mask = padding_attention_mask(padding)
        context.padding = padding
        if self.training and self.draws_dropout:
            self._key_dropout(context, sample_numbers, token_index)
        return context

    def _key_dropout(self, context: Context, sample_numbers: Tensor | None, token_index: Tensor) -> None:
        if sample_numbers is None:
            sample_numbers = torch.arange(context.batch, device=token_index.device)
        keys = token_keys(self.seed, sample_numbers, token_index)
        count = self.config.num_layers + len(self.config.mtp_layers)
        layers = torch.arange(-1, count, dtype=torch.int32, device=keys.device)
        context.layers = layers[1:]
        stream = self.shard_sequence(keys, context.layout)
        context.output_rows = output_rows(stream, context.layers)
        columns = column_keys(self.config.hidden_size, keys.device)
        before = layers[self.first_layer]  # the embedding's number: one less than the first layer's
        context.dropout = DropoutKeys(keys, stream, columns, before)


def _check_positions(config: ModelConfig, length: int) -> None:
    longest = config.max_position_embeddings
    if config.learns_positions and length > longest:
        raise ConfigError(
            f"{length} tokens are more than the {longest} learned positions of the model "
            "(model.max_position_embeddings); shorten the input"
        )


def stacks_of(model: nn.Module) -> list[Stack]:
    """Every stack of a model, which may be one itself."""
    return [module for module in model.modules() if isinstance(module, Stack)]


def layers_of(model: nn.Module) -> dict[str, TransformerLayer]:
    """Every layer of a model's stacks by its name, in the order of their numbers; of a model without, its `layers`."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, TransformerLayer)}
    if not layers:
        return {f"layers.{name}": module for name, module in model.layers.named_children()}
    return dict(sorted(layers.items(), key=lambda item: item[1].number))


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
    heads: ClassVar[Sequence[str]] = ("output_layer", "vocabulary")
    """What stands behind the layers: modules that the last pipeline stage has, and None on the others."""

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
        numbers = [*(range(config.num_layers) if numbers is None else numbers), *config.mtp_layers]
        kinds = dict(causal=causal, cross=cross, mixer=mixer)
        super().__init__(
            config, numbers, seed=seed, device=device, embedding=Embedding(config, device), **kinds
        )
        self.compute_dtype = compute_dtype
        self.output_layer = self.vocabulary = None
        if config.untie_embeddings_and_output_weights:
            size = config.hidden_size, config.padded_vocab_size
            self.output_layer = OutputMatrix(*size, bias=False, device=device)
        if config.add_output_bias:
            self.vocabulary = VocabularyBias(config, device)
        # Seams: parallel/seams.py says what each is for.
        self.loss = cross_entropy_sum
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
        position_ids: Tensor | None = None,  # int64 [batch, seq]; None: token_index
        token_index: Tensor | None = None,  # int64 [seq]: each token's in the whole sequence; None: 0, 1, …
        document_ends: Tensor
        | None = None,  # int32 [batch, documents] (ops/documents.py): attention stays inside
        padding_mask: Tensor
        | None = None,  # bool [batch, seq], of whole sequences everywhere, False for what fills up; None: nothing does
        padding: Tensor | None = None,  # bool [batch, seq], as a Batch has it
        sample_numbers: Tensor | None = None,  # int64 [batch]: positions in the data stream; keys of dropout
        encoded: Encoded | None = None,  # what cross-attention attends to
        balance_scale: Tensor | None = None,  # float32 scalar: of the balancing losses' gradient; None: none
        mtp_targets: MTPTargets | None = None,  # what further layers predict; None: they are left out
        loss_scale: Tensor | None = None,  # float32 scalar: the loss's gradient is made times this; None: 1
        max_label_tokens: int
        | None = None,  # tokens whose loss_mask is not 0, at most; None: that is not known
    ) -> Tensor | dict[str, Tensor]:
        """Logits [batch, seq, vocab] in the compute dtype, or with labels the loss: a float32 scalar.

        A pipeline stage that is not the last gives its `streams`. Raises ConfigError for more tokens than there
        are learned positions.
        """
        context = self.context(
            input_ids,
            trains=labels is not None,
            position_ids=position_ids,
            token_index=token_index,
            document_ends=document_ends,
            padding_mask=padding_mask,
            padding=padding,
            sample_numbers=sample_numbers,
        )
        context.balance_scale, context.encoded, context.max_label_tokens = (
            balance_scale,
            encoded,
            max_label_tokens,
        )
        x = self.embed(input_ids, context) if streams is None else streams["hidden"]
        x = super().forward(x, context)  # [batch, seq, hidden]
        if self.final_layernorm is None:
            return {"hidden": x}
        if labels is None:
            return self.vocabulary_logits(x, context)
        loss = self.vocabulary_loss(x, context, labels, loss_mask, objective, loss_scale)
        if mtp_targets is None:
            return loss
        return self._add_mtp_loss(loss, x, mtp_targets, context, loss_scale)

    def vocabulary_logits(self, x: Tensor, context: Context) -> Tensor:
        """Those of x, the head's input [batch, seq, hidden]: [batch, seq, vocab]."""
        return self._by_output(self.logits, self.head_input(x), *self._vocabulary, context)

    def vocabulary_loss(
        self,
        x: Tensor,
        context: Context,
        labels: Tensor,
        loss_mask: Tensor | None,
        objective: Objective | None,
        loss_scale: Tensor | None,
    ) -> Tensor:
        """That of the labels' log-probabilities, as `forward` gives it: a float32 scalar."""
        x = self.head_input(x)
        if objective is not None:
            sizes = self._vocabulary
            found = self._by_output(self.logprobs, x, labels, *sizes, context, objective, loss_scale)
            return objective.loss(*found, loss_scale)
        if loss_mask is None:
            loss_mask = torch.ones_like(labels, dtype=torch.float32)
        return self._by_output(self.loss, x, labels, loss_mask, *self._vocabulary, context, loss_scale)

    def head_input(self, x: Tensor) -> Tensor:
        """What the output matrix is given of the last norm's output."""
        scaling = self.config.logits_scaling
        return x if scaling == 1 else x / scaling

    def _by_output(self, function: Callable, x: Tensor, *args):
        """function(x, the output matrix, *args), with the bias behind the matrix where there is one"""
        if self.output_bias is not None:
            function = partial(function, bias=self.output_bias)
        if self.output_layer is None:
            return function(x, self.output_weight, *args)
        return self.output_layer(x, function, *args)

    @property
    def _vocabulary(self) -> tuple[int, float | None]:
        return self.config.vocab_size, self.config.final_logit_softcapping

    def _add_mtp_loss(
        self,
        loss: Tensor,
        x: Tensor,
        mtp_targets: MTPTargets,
        context: Context,
        scale: Tensor | None,
    ) -> Tensor:
        """`loss` with the gradient of the further layers' losses; x [batch, seq, hidden] is what the head has read."""
        losses, factor = [], self.config.mtp_loss_scaling_factor / len(self.config.mtp_layers)
        scale = torch.full((), factor, device=x.device) if scale is None else scale * factor
        scales = (scale * mtp_targets.weights).expand(len(self.config.mtp_layers))
        for k, number in enumerate(map(str, self.config.mtp_layers)):
            told = replace(context, mtp_embeddings=self.embed(mtp_targets.tokens[k], context))
            x = self.runner([self.layers[number]], x, told)
            labels, loss_mask = mtp_targets.labels[k], mtp_targets.loss_mask[k]
            sizes = self._vocabulary
            given = labels, loss_mask, *sizes, replace(context, max_label_tokens=None), scales[k]
            losses.append(self._by_output(self.loss, self.head_input(x), *given))
        if mtp_targets.sums is not None:
            mtp_targets.sums += torch.stack(losses).detach()
        return add_mtp_losses(loss, sum(losses))

    def embed(self, input_ids: Tensor, context: Context, tokentype_ids: Tensor | None = None) -> Tensor:
        """The tokens' rows, in the compute dtype, after dropout: [batch, seq, hidden]."""
        position_ids = self.shard_sequence(context.position_ids, context.layout)
        if tokentype_ids is not None:
            tokentype_ids = self.shard_sequence(tokentype_ids, context.layout)
        x = self.embedding(input_ids, position_ids, context, tokentype_ids).to(self.compute_dtype)
        if self.config.scale_embeddings:  # rounded to the compute dtype, as Gemma's own code does
            x = x * torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype).item()
        if self.config.embedding_multiplier != 1:
            x = x * self.config.embedding_multiplier
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

    @property
    def output_bias(self) -> Tensor | None:
        """What is added behind the output matrix, float32 [padded vocab]."""
        return None if self.vocabulary is None else local(self.vocabulary.bias)
