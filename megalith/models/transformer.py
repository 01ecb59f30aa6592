"""The model as single-device PyTorch: an embedding, a stack of layers, and the output matmul or the loss.

A stack is a list of layers (layer.py) and a norm, from hidden states to hidden states: an encoder or a decoder without
its vocabulary. `Stack.context` computes once per pass what all layers need: positions, masks, dropout keys. A stack's
`runner` runs its layers; recomputation, ping-pong micro-batches and activation offloading replace it.

Parameters are fp32. The embedding's output is cast to the compute dtype, and every layer computes in its input's dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from megalith.config import ModelConfig
from megalith.local_shards import local
from megalith.models.default_positions import check_positions, default_positions
from megalith.models.identity import identity
from megalith.models.inputs import LossInputs, TokenInputs
from megalith.models.layer import TransformerLayer, layer_class
from megalith.models.lm_head import LMHead
from megalith.models.loss import all_logits, cross_entropy_sum, target_logprobs
from megalith.models.mixers import MakeMixer, make_mixer
from megalith.models.mixers.attention import RelativeBias
from megalith.models.mtp import add_mtp_losses
from megalith.models.norm import Norm, norm_or_identity
from megalith.models.pass_context import (
    Context,
    Encoded,
    LayerRoutes,
    PassLayout,
    one_device,
    set_masks_of_layers,
)
from megalith.models.rope import local_rotary_tables, rotary_tables
from megalith.models.vocabulary import OutputMatrix, VocabularyBias, make_embedding
from megalith.ops.documents import (
    document_ids,
    mark_dynamic_documents,
    padding_attention_mask,
    same_document_mask,
)
from megalith.ops.dropout import (
    EMBEDDING_OUTPUT,
    DropoutKeys,
    column_keys,
    counter_dropout,
    output_rows,
    token_keys,
)

PADDING = -1  # document id of padding, which attends only to padding
Runner = Callable[[Sequence[TransformerLayer], Tensor, Context], Tensor]


def run_layers(layers: Sequence[TransformerLayer], x: Tensor, context: Context) -> Tensor:
    """Return x [batch, seq, hidden] after these layers."""
    for layer in layers:
        x = layer(x, context.at_layer(layer.number))
    return x


class Stack(nn.Module):
    """Layers and a final norm. A pipeline stage has only some of the layers, and perhaps no norm.

    Args:
        config: sizes, norms, positions.
        layer_numbers: indices of the layers, which no other stack of the model has.
        seed: seed of dropout.
        device: where parameters are created, without values.
        causal: if False, every token attends to all tokens of its document.
        cross: every layer also attends to `context.encoded`.
        mixer: makes a layer's mixer.
        embedding: embedding of a model that reads tokens; None for other models.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_numbers: Iterable[int],
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
        layer_numbers = list(layer_numbers)
        self.first_layer = layer_numbers[0] if layer_numbers else 0
        self.layers = nn.ModuleDict(
            {str(n): layer_class(config, n, cross)(config, n, device, mixer=mixer) for n in layer_numbers}
        )
        self.final_layernorm = Norm(config, config.hidden_size, device)
        self.relative_attention_bias = None
        if config.shares_relative_positions:
            self.relative_attention_bias = RelativeBias(config, causal, device)
        self.draws_dropout = config.hidden_dropout > 0 or config.attention_dropout > 0
        # Seams: see parallel/seams.py.
        self.pass_layout = one_device
        self.runner: Runner = run_layers
        self.shard_sequence = identity
        self.reduce_sequence = identity

    def forward(self, x: Tensor, context: Context) -> Tensor:  # [batch, seq, hidden]
        mtp = self.config.mtp_layers
        x = self.runner([layer for layer in self.layers.values() if layer.number not in mtp], x, context)
        return norm_or_identity(self.final_layernorm, x)

    def context(
        self, input_ids: Tensor, token_inputs: TokenInputs | None = None, *, trains: bool = True
    ) -> Context:
        """Return the inputs that all layers share in a forward pass: positions, masks, dropout keys and the layout.

        Args:
            input_ids: int64 [batch, seq]; only the shape matters.
            token_inputs: positions, documents and padding of these tokens.
            trains: True if the pass computes a loss, False for logits.

        Raises:
            ConfigError: there are more tokens than learned positions.
        """
        (batch, seq), device, inputs = input_ids.shape, input_ids.device, token_inputs or TokenInputs()
        token_index, padding_mask = inputs.token_index, inputs.padding_mask
        layout = self.pass_layout(
            input_ids.numel(),
            trains=trains,
            has_position_ids=token_index is not None,
            cp_size=inputs.cp_size,
        )
        if token_index is None:
            check_positions(self.config, seq, inputs)
            token_index = torch.arange(seq, device=device)
        position_ids = inputs.position_ids
        if position_ids is None:
            position_ids = default_positions(self.config, token_index, batch, padding_mask)
        context = Context(batch, layout, self.causal, position_ids=position_ids)
        if self.config.relative_attention_per_layer:
            context.token_index = token_index
        if self.config.position_embedding_type == "rope":
            context.rotary = rotary_tables(self.config, position_ids, seq * layout.cp_size)
            if self.config.rotary_base_local is not None:
                context.rotary_local = local_rotary_tables(self.config, position_ids)
        if self.relative_attention_bias is not None and self.layers:  # a pipeline stage may have none
            context.bias = self.relative_attention_bias(token_index, layout)
        if self.config.num_experts:
            token_ids = token_index[None] * batch + torch.arange(batch, device=device)[:, None]
            context.global_token_ids = self.shard_sequence(token_ids, layout).flatten()
            if (real := inputs.real_tokens(token_index)) is not None:
                context.real = self.shard_sequence(real, layout).flatten()
            if inputs.routes is not None:
                context.routes = self._layer_routes(inputs.routes, layout)
        if padding_mask is not None:
            documents = padding_mask.long() - 1  # PADDING, and document 0
            if inputs.document_ends is not None:
                documents = document_ids(inputs.document_ends, padding_mask.shape[1])
                documents = documents.masked_fill(~padding_mask, PADDING)
            context.mask = same_document_mask(documents, documents, self.causal)
        elif inputs.document_ends is not None:
            context.documents = mark_dynamic_documents(inputs.document_ends)
        elif inputs.padding is not None:
            context.mask = padding_attention_mask(inputs.padding)
        set_masks_of_layers(context, self.config, seq * layout.cp_size)
        context.padding = inputs.padding
        if context.padding is None and padding_mask is not None and self.config.recurrent_mixers:
            context.padding = ~padding_mask[:, token_index]
        if self.training and self.draws_dropout:
            self._key_dropout(context, inputs.sample_numbers, token_index)
        return context

    def _layer_routes(self, routes: Tensor, layout: PassLayout) -> dict[int, LayerRoutes]:
        """Return the experts that each layer replays. `routes` is int16 [batch, seq, MoE layers, topk]."""
        stream = self.shard_sequence(routes.flatten(2), layout).flatten(0, 1).unflatten(1, routes.shape[2:])
        by_layer = stream.transpose(0, 1).contiguous()  # [layers, tokens, topk]
        return {
            number: LayerRoutes(replayed=by_layer[index])
            for index, number in enumerate(self.config.routed_layers)
        }

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
        before = layers[self.first_layer]  # the embedding's number, the first layer's minus 1
        context.dropout = DropoutKeys(keys, stream, columns, before)


def stacks_of(model: nn.Module) -> list[Stack]:
    """Return all stacks of a model, including the model itself if it is a stack."""
    return [module for module in model.modules() if isinstance(module, Stack)]


def layers_of(model: nn.Module) -> dict[str, TransformerLayer]:
    """Return the layers of a model's stacks by name, ordered by number; for a user's own model, its `layers`."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, TransformerLayer)}
    if not layers:
        return {f"layers.{name}": module for name, module in model.layers.named_children()}
    return dict(sorted(layers.items(), key=lambda item: item[1].number))


class Transformer(Stack):
    """A language model: an embedding, a stack of layers, and an output matrix.

    Parameters have no values until `megalith.models.init.initialize` or a checkpoint fills them. A pipeline stage
    (`stage`) is a Transformer too, without the modules of other stages.

    Args:
        config: the model's configuration.
        layer_numbers: indices of the layers; None means all.
        compute_dtype: dtype of the layers' computation.
        seed: seed of dropout.
        device: where parameters are created.
        causal, cross, mixer: see Stack.
    """

    streams: ClassVar[Mapping[str, str]] = {"hidden": "input_ids"}
    """Residual streams that a pipeline stage sends to the next → name of the batch tensor with the stream's tokens."""
    reads: ClassVar[Sequence[str]] = ()
    """Further tensors of the batch that `forward` takes by name."""
    heads: ClassVar[Sequence[str]] = ("output_layer", "vocabulary", "lm_head")
    """Modules after the layers, which only the last pipeline stage has; None on others."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        layer_numbers: Iterable[int] | None = None,
        compute_dtype: torch.dtype = torch.float32,
        seed: int = 0,
        device: torch.device | str | None = None,
        causal: bool = True,
        cross: bool = False,
        mixer: MakeMixer = make_mixer,
    ):
        layer_numbers = [
            *(range(config.num_layers) if layer_numbers is None else layer_numbers),
            *config.mtp_layers,
        ]
        kinds = dict(causal=causal, cross=cross, mixer=mixer)
        super().__init__(
            config, layer_numbers, seed=seed, device=device, embedding=make_embedding(config, device), **kinds
        )
        self.compute_dtype = compute_dtype
        self.output_layer = self.vocabulary = None
        if config.untie_embeddings_and_output_weights:
            size = config.hidden_size, config.padded_vocab_size
            self.output_layer = OutputMatrix(*size, bias=False, device=device)
        if config.add_output_bias:
            self.vocabulary = VocabularyBias(config, device)
        self.lm_head = LMHead(config, device) if config.add_decoder_lm_head else None
        # Seams: see parallel/seams.py.
        self.loss = cross_entropy_sum
        self.logprobs = target_logprobs
        self.logits = all_logits
        self.has_adapters = False  # if True, everything else is frozen: see adapters.py
        self.saved_names: frozenset[str] = (
            frozenset()
        )  # but for these parameters and buffers of the full model

    def forward(
        self,
        input_ids: Tensor,
        *,
        token_inputs: TokenInputs | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        loss_inputs: LossInputs | None = None,
        streams: Mapping[str, Tensor] | None = None,
        encoded: Encoded | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Return logits, or the loss if there are labels, or this pipeline stage's `streams` if it is not the last.

        Args:
            input_ids: int64 [batch, seq].
            token_inputs: positions, documents, padding; None means one document per sequence, no padding.
            labels: int64 [batch, seq], or [batch, seq, k] for an objective with k candidates.
            loss_mask: float32 [batch, seq]; None means every token counts.
            loss_inputs: objective, scales, MTP targets; None means cross-entropy.
            streams: residual streams of the previous pipeline stage; None means this is the first stage.
            encoded: another sequence, for cross-attention.

        Returns:
            Logits [batch, seq, vocab] in the compute dtype, or the loss, a float32 scalar: a sum over tokens.

        Raises:
            ConfigError: there are more tokens than learned positions.
        """
        loss_inputs = loss_inputs or LossInputs()
        context = self.context(input_ids, token_inputs, trains=labels is not None)
        context.encoded, context.balance_scale = encoded, loss_inputs.balance_scale
        context.max_label_tokens = loss_inputs.max_label_tokens
        x = self.embed(input_ids, context) if streams is None else streams["hidden"]
        x = super().forward(x, context)  # [batch, seq, hidden]
        if self.final_layernorm is None:
            return {"hidden": x}
        if labels is None:
            return self.vocabulary_logits(x, context)
        loss = self.vocabulary_loss(x, context, labels, loss_mask, loss_inputs)
        if loss_inputs.mtp_targets is None:
            return loss
        return self._add_mtp_loss(loss, x, context, loss_inputs)

    def stage(self, layers: Collection[int], *, is_first: bool, is_last: bool) -> Transformer:
        """Return a pipeline stage: a copy of this model, on the meta device, without the modules of other stages.

        Parameters keep their names. The first stage has the embedding, the last one the MTP layers, the final norm and
        `heads`, and a copy of the word embedding if the output matrix is tied to it or the MTP layers read it. Every
        stage with layers of a stack has a copy of the stack's relative positions.

        Args:
            layers: indices of the stage's layers.
            is_first: True for the first stage.
            is_last: True for the last stage.
        """
        layer_numbers = {*map(str, layers), *(map(str, self.config.mtp_layers) if is_last else ())}
        others = [
            layer for s in stacks_of(self) for name, layer in s.layers.items() if name not in layer_numbers
        ]
        stage = copy.deepcopy(self, {id(layer): layer for layer in others})  # does not copy what is removed
        if is_last and self.config.embedding_at_head and not is_first:
            stage.embedding.keep_words_only()
        elif not is_first:
            stage.embedding = None
        for stack in stacks_of(stage):
            if stack is not stage and not is_first:
                stack.embedding = None
            ends_here = is_last if stack is stage else [*stack.layers][-1] in layer_numbers
            for number in set(stack.layers) - layer_numbers:
                del stack.layers[number]
            if not ends_here:
                stack.final_layernorm = None
        for name in () if is_last else self.heads:
            setattr(stage, name, None)
        return stage

    def vocabulary_logits(self, x: Tensor, context: Context) -> Tensor:
        """Return the logits [batch, seq, vocab] of x, the last norm's output [batch, seq, hidden]."""
        return self._call_head(self.logits, self.head_input(x), *self._vocabulary, context)

    def vocabulary_loss(
        self,
        x: Tensor,
        context: Context,
        labels: Tensor,
        loss_mask: Tensor | None,
        inputs: LossInputs,
    ) -> Tensor:
        """Return the loss of x, the last norm's output [batch, seq, hidden]: a float32 scalar."""
        x, sizes, scale = self.head_input(x), self._vocabulary, inputs.loss_scale
        if inputs.objective is not None:
            outputs = self._call_head(self.logprobs, x, labels, *sizes, context, inputs.objective, scale)
            return inputs.objective.loss(*outputs, scale)
        if loss_mask is None:
            loss_mask = torch.ones_like(labels, dtype=torch.float32)
        z_loss = dict(
            output_z_loss_coeff=self.config.output_z_loss_coeff, output_z_loss_sum=inputs.z_loss_sum
        )
        context = replace(context, **z_loss)
        return self._call_head(self.loss, x, labels, loss_mask, *sizes, context, scale)

    def head_input(self, x: Tensor) -> Tensor:
        """Return the input of the output matrix, [..., hidden], for the last norm's output x of the same shape."""
        if self.config.add_decoder_lm_head:
            x = self.lm_head(x)
        divisor = self.config.logits_divisor
        return x if divisor == 1 else x / divisor

    def _call_head(self, function: Callable, x: Tensor, *args):
        """Call function(x, output matrix, *args), with the output bias as another argument if there is one."""
        if self.output_bias is not None:
            function = partial(function, bias=self.output_bias)
        if self.output_layer is None:
            return function(x, self.output_weight, *args)
        return self.output_layer(x, function, *args)

    @property
    def _vocabulary(self) -> tuple[int, float | None]:
        return self.config.vocab_size, self.config.final_logit_softcapping

    def _add_mtp_loss(self, loss: Tensor, x: Tensor, context: Context, inputs: LossInputs) -> Tensor:
        """Return `loss` with the gradient of the MTP losses added; x [batch, seq, hidden] is the head's input."""
        targets, scale, count = inputs.mtp_targets, inputs.loss_scale, len(self.config.mtp_layers)
        losses, factor = [], self.config.mtp_loss_scaling_factor / count
        scale = torch.full((), factor, device=x.device) if scale is None else scale * factor
        scales = (scale * targets.weights).expand(count)
        for k, number in enumerate(map(str, self.config.mtp_layers)):
            embeddings = self.embed(targets.tokens[k], context)
            x = self.runner([self.layers[number]], x, replace(context, mtp_embeddings=embeddings))
            head_context = replace(context, max_label_tokens=None)
            args = targets.labels[k], targets.loss_mask[k], *self._vocabulary, head_context, scales[k]
            losses.append(self._call_head(self.loss, self.head_input(x), *args))
        if targets.sums is not None:
            targets.sums += torch.stack(losses).detach()
        return add_mtp_losses(loss, sum(losses))

    def embed(self, input_ids: Tensor, context: Context, tokentype_ids: Tensor | None = None) -> Tensor:
        """Return the embedding's output [batch, seq, hidden] in the compute dtype, after dropout."""
        position_ids = self.shard_sequence(context.position_ids, context.layout)
        if tokentype_ids is not None:
            tokentype_ids = self.shard_sequence(tokentype_ids, context.layout)
        return self.stream_of(self.embedding(input_ids, position_ids, context, tokentype_ids), context)

    def stream_of(self, embedded: Tensor, context: Context) -> Tensor:
        """Return the residual stream for `embedded`, the embedding's output [batch, seq, hidden]."""
        x = embedded.to(self.compute_dtype)
        if self.config.scale_embeddings and not self.config.adds_positions:
            # rounded to the compute dtype, as in Gemma's code
            x = x * torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype).item()
        if self.config.embedding_multiplier != 1:
            x = x * self.config.embedding_multiplier
        if context.dropout is None or self.config.hidden_dropout == 0:
            return x
        rows = context.dropout.stream_rows(EMBEDDING_OUTPUT)
        return counter_dropout(x, self.config.hidden_dropout, rows, context.dropout.columns)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Transformer:
        """Apply `.float()`, `.bfloat16()`, `.to(dtype)` or `.to(device)`; a dtype becomes the compute dtype too."""
        super()._apply(fn, recurse)
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        return self

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    @property
    def output_weight(self) -> Tensor:
        """The output matrix [padded vocab, hidden]: the word embedding if they are tied."""
        return (self.output_layer or self.embedding.word_embeddings).matrix

    @property
    def output_bias(self) -> Tensor | None:
        """The logits' bias, float32 [padded vocab], or None without one."""
        return None if self.vocabulary is None else local(self.vocabulary.bias)
