"""A stack: layers one behind the other and a norm, from hidden states to hidden states.

Causal or not, with or without cross-attention to what another stack has made: an encoder, a decoder and all that has no
vocabulary is one. What its layers need to know of the tokens of a pass is made once, in `context`. Recomputation,
ping-pong micro-batches and offloaded activations are other runners of its list of layers than `run_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from megalith.config import ModelConfig
from megalith.errors import ConfigError
from megalith.models.layer import TransformerLayer, normed
from megalith.models.mixers import MakeMixer, make_mixer
from megalith.models.norm import Norm
from megalith.models.pass_context import Context, PassLayout, one_device
from megalith.models.rope import local_rotary_tables, rotary_tables
from megalith.ops.documents import document_ids, mask_of_ids, prepared
from megalith.ops.dropout import DropoutKeys, column_keys, output_rows, token_keys

PADDING = -1  # the document of tokens that fill up: they see each other alone, and nobody sees them


Runner = Callable[[Sequence[TransformerLayer], Tensor, Context], Tensor]


def run_layers(layers: Sequence[TransformerLayer], x: Tensor, context: Context) -> Tensor:
    """x [batch, seq, hidden] through these layers."""
    for layer in layers:
        x = layer(x, context.at_layer(layer.number))
    return x


def every_token(x: Tensor, layout: PassLayout) -> Tensor:
    """What the residual stream here has of something that every token has: sequence parallelism gives its share."""
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
        self.draws_dropout = config.hidden_dropout > 0 or config.attention_dropout > 0
        # Seams: parallel/seams.py says what each is for.
        self.pass_layout = one_device
        self.runner: Runner = run_layers
        self.shard_tokens = every_token

    def forward(self, x: Tensor, context: Context) -> Tensor:  # [batch, seq, hidden]
        further = self.config.further_layers
        x = self.runner([layer for layer in self.layers.values() if layer.number not in further], x, context)
        return normed(self.final_layernorm, x)

    def context(
        self,
        input_ids: Tensor,  # int64 [batch, seq], of which the shape matters alone
        *,
        trains: bool = True,  # whether a loss follows; else generation
        position_ids: Tensor | None = None,  # int64 [batch, seq]; None: the places
        places: Tensor | None = None,  # int64 [seq]: each token's in the whole sequence; None: 0, 1, …
        document_ends: Tensor
        | None = None,  # int32 [batch, documents] (ops/documents.py): attention stays inside
        padding_mask: Tensor | None = None,  # bool [batch, seq], False for what fills up; None: nothing does
        sample_numbers: Tensor | None = None,  # int64 [batch]: places in the run's stream, the key of dropout
    ) -> Context:
        """What the layers need to know of these tokens.

        Raises ConfigError for more tokens than there are learned positions.
        """
        (batch, seq), device = input_ids.shape, input_ids.device
        layout = self.pass_layout(input_ids.numel(), trains=trains, has_places=places is not None)
        if places is None:
            _check_positions(self.config, seq)
            places = torch.arange(seq, device=device)
        if position_ids is None:
            position_ids = places.expand(batch, seq)
        context = Context(batch, layout, self.causal, position_ids=position_ids)
        if self.config.position_embedding_type == "rope":
            context.rotary = rotary_tables(self.config, position_ids, seq * layout.sequence_parts)
            if self.config.rotary_base_local is not None:
                context.rotary_local = local_rotary_tables(self.config, position_ids)
        if self.config.num_experts:
            numbers = places[None] * batch + torch.arange(batch, device=device)[:, None]
            context.numbers = self.shard_tokens(numbers, layout).flatten()
        if padding_mask is not None:
            numbers = (
                torch.zeros_like(input_ids) if document_ends is None else document_ids(document_ends, seq)
            )
            numbers = numbers.masked_fill(~padding_mask, PADDING)
            context.mask = mask_of_ids(numbers, numbers, self.causal)
        elif document_ends is not None:
            context.documents = prepared(document_ends)
        if self.training and self.draws_dropout:
            self._key_dropout(context, sample_numbers, places)
        return context

    def _key_dropout(self, context: Context, sample_numbers: Tensor | None, places: Tensor) -> None:
        if sample_numbers is None:
            sample_numbers = torch.arange(context.batch, device=places.device)
        keys = token_keys(self.seed, sample_numbers, places)
        count = self.config.num_layers + len(self.config.further_layers)
        layers = torch.arange(-1, count, dtype=torch.int32, device=keys.device)
        context.layers = layers[1:]
        stream = self.shard_tokens(keys, context.layout)
        context.output_rows = output_rows(stream, context.layers)
        columns = column_keys(self.config.hidden_size, keys.device)
        before = layers[self.first_layer]  # the embedding's number: one less than the first layer's
        context.dropout = DropoutKeys(keys, stream, columns, before)


def _check_positions(config: ModelConfig, length: int) -> None:
    longest = config.max_position_embeddings
    if config.position_embedding_type == "learned_absolute" and length > longest:
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
