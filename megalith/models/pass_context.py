"""Context of a forward pass: the layout of its tokens on this rank, and the inputs that all layers use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.models.cache import Cache
from megalith.models.rope import Tables
from megalith.ops.documents import (
    chunk_ends,
    document_ids,
    mark_dynamic_documents,
    same_document_mask,
)
from megalith.ops.dropout import DropoutKeys


@dataclass(frozen=True)
class PassLayout:
    """Arrangement of a forward pass's tokens on this rank. On one device, the rank has all tokens, in order."""

    sharded: bool = False  # sequence parallelism: the residual stream has this rank's shard of the tokens
    micro_batches: int = 1  # parts of the micro-batch that run interleaved, each sharded separately
    cp_size: int = 1  # context parallelism: number of shards of each sequence
    full_sequence: bool = False  # every context-parallel rank has full sequences: generation
    core: Callable[..., Tensor] | None = None  # attention of this pass, which the layers' cores take as `run`


def one_device(
    tokens: int, *, trains: bool, has_position_ids: bool, cp_size: int | None = None
) -> PassLayout:
    """Return how tokens are arranged in a forward pass on one device, whatever the arguments are. Parallel axes replace
    this function.

    Args:
        tokens: number of tokens in the micro-batch.
        trains: the pass has labels.
        has_position_ids: the pass has a token_index.
        cp_size: number of ranks that share the rows of the pass, if it differs from pass to pass.
    """
    return PassLayout()


@dataclass(frozen=True)
class LayerRoutes:
    """Experts for a layer's router to replay, and memory to record the experts that it chooses."""

    replayed: Tensor | None = (
        None  # int16 [tokens of the residual stream, topk]; negative: the router's own choice
    )
    recorded: Tensor | None = None  # int16 [tokens of the residual stream, topk], which the router fills


@dataclass
class Context:
    """Layout, positions, mask, dropout keys and cache of a forward pass."""

    batch: int  # sequences; the residual stream may have their tokens in one row, or some of them
    layout: PassLayout  # no default: the compiler of torch 2.11 cannot handle a default object
    causal: bool = True  # tokens attend to earlier tokens only
    position_ids: Tensor | None = None  # int64 [batch, seq]
    token_index: Tensor | None = None
    """int64 [seq], each token's index in the full sequence, for layers with relative positions of their own."""
    rotary: Tables | None = None
    rotary_local: Tables | None = None  # of layers with a window, if they have their own base
    mask: Tensor | None = None
    """bool [batch, 1, queries, keys] of full sequences, True where a query attends to a key; None: see `causal`."""
    bias: Tensor | None = None
    """float32 [1, heads, queries, keys], added to the scores of self-attention: relative positions."""
    documents: Tensor | None = None  # int32 [batch, documents] of full sequences (ops/documents.py)
    chunk_mask: Tensor | None = None  # `mask` and `documents` of layers whose attention stays within chunks
    chunk_documents: Tensor | None = None
    window_mask: Tensor | None = None  # `mask` of an encoder's layers with a window
    padding: Tensor | None = None  # bool [batch, seq] of the local tokens, as in Batch
    dropout: DropoutKeys | None = None  # None: no dropout
    layers: Tensor | None = None  # int32 [num_layers], indices of the layers; with dropout
    output_rows: Tensor | None = None  # int32 [num_layers, 2, …]: see ops.dropout.output_rows
    cache: Cache | None = None  # earlier tokens, in generation
    global_token_ids: Tensor | None = None
    """int64 [tokens of the residual stream], token_index · batch + sequence, for experts."""
    real: Tensor | None = None
    """bool [tokens of the residual stream], False for padding, which the balance of experts omits. None: no padding."""
    routes: Mapping[int, LayerRoutes] | None = None  # by index of the layer; None: routers choose, unrecorded
    layer_routes: LayerRoutes | None = None  # a layer's entry of `routes`
    mtp_embeddings: Tensor | None = None  # [batch, seq, hidden], embeddings of an MTP layer's input tokens
    max_label_tokens: int | None = None  # local tokens with a nonzero loss_mask, at most; None: unknown
    output_z_loss_coeff: float = 0.0  # weight of the logits' z-loss in the gradient
    output_z_loss_sum: Tensor | None = None  # float32 scalar: its sum over the local tokens is added here
    balance_scale: Tensor | None = None  # of the balancing losses' gradient; None: no backward pass
    adapters: Tensor | None = None
    """Slot (adapter_slots.py) of each sequence's adapter, int64 [batch], 0 for none. None: there are no slots."""
    encoded: Encoded | None = None  # the sequence that cross-attention attends to

    def without_padding(self, value: Tensor) -> Tensor:
        """Return attention's values [batch, seq, heads, head_dim] with zeros for padding.

        The output of a token that attends only to padding is then zero.
        """
        return value if self.padding is None else value.masked_fill(self.padding[:, :, None, None], 0.0)

    def at_layer(self, number: int) -> Context:
        """Return a layer's context, with its cache, its expert routing and its dropout keys.

        The keys contain the layer's number as a tensor, so that layers share compiled code.
        """
        cache = None if self.cache is None else self.cache.at_layer(number)
        routes = None if self.routes is None else self.routes.get(number)
        if self.dropout is None:
            if cache is None and self.routes is None:
                return self
            return replace(self, cache=cache, routes=None, layer_routes=routes)
        dropout = replace(self.dropout, layer=self.layers[number], outputs=self.output_rows[number])
        return replace(
            self,
            cache=cache,
            routes=None,
            layer_routes=routes,
            layers=None,
            output_rows=None,
            dropout=dropout,
        )


@dataclass(frozen=True)
class Encoded:
    """Output of a stack for another sequence, to which cross-attention attends."""

    hidden: Tensor  # [batch, keys, hidden], the residual stream of the stack's pass
    context: Context  # of that pass
    mask: Tensor | None = None  # bool [batch, 1, queries or 1, keys], True to attend; None: all
    # int32 [2, batch, documents], ends in the queries and in the keys; None: one
    documents: Tensor | None = None


def set_masks_of_layers(context: Context, config: ModelConfig, length: int) -> None:
    """Set the attention masks of layers that attend to a subset of the sequence, for full sequences of `length`
    tokens.
    """
    if config.attention_chunk_size is not None:
        set_chunks(context, config.attention_chunk_size, length)
    if not context.causal and config.window_size is not None:
        set_window_mask(context, *config.window_size, length)


def set_chunks(context: Context, size: int, length: int) -> None:
    """Set mask and documents of attention within chunks of `size` tokens, for full sequences of `length` tokens."""
    context.chunk_mask, context.chunk_documents = context.mask, context.documents
    if length <= size:
        return
    if context.mask is not None:
        chunks = context.position_ids // size
        context.chunk_mask = context.mask & same_document_mask(chunks, chunks, causal=False)
        return
    ends = context.documents
    if ends is None:
        ends = torch.full((context.batch, 1), length, dtype=torch.int32, device=context.position_ids.device)
    context.chunk_documents = mark_dynamic_documents(chunk_ends(ends, size, length))


def set_window_mask(context: Context, before: int, after: int, length: int) -> None:
    """Set the mask of attention to `before` earlier and `after` later tokens, for full sequences of `length` tokens.

    The new mask also excludes the keys that the pass's mask or documents exclude.
    """
    if length <= min(before, after) + 1:
        return
    index = torch.arange(length, device=context.position_ids.device)
    distance = index[:, None] - index  # how far a key is before a query
    mask = ((distance <= before) & (distance >= -after))[None, None]
    if context.mask is not None:
        mask = mask & context.mask
    elif context.documents is not None:
        documents = document_ids(context.documents, length)
        mask = mask & same_document_mask(documents, documents, causal=False)
    context.window_mask = mask
