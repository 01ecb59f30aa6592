"""Ping-pong micro-batches (as in Domino, Wang et al. 2024): while the collective of one half of a micro-batch's
sequences runs, the other half computes.

With tensor parallelism each layer gets both halves and runs one after the other, each as if it were the micro-batch;
the layer is unchanged. Compiled, that is one graph of two chains without an edge between them, whose nodes
interleave.py orders so that a collective of either overlaps matmuls of the other, forward and backward. Not compiled,
the halves run one after the other and nothing is gained.

With context but without tensor parallelism, only attention communicates, so only attention and its linears run as two
halves, inside the layer's graph. Norms and MLP take the whole micro-batch: larger matmuls, and wgrads over more tokens,
are faster.

Weights are gathered once for both halves, because a layer is FSDP's unit. The gradients of the two halves are added in
the layer's backward pass. Everything before and after the layers processes the whole micro-batch. With sequence
parallelism each half is sharded by itself, so a rank's shard of the residual stream is its shard of one half followed
by its shard of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalith.config import ParallelConfig
from megalith.models.layer import TransformerLayer
from megalith.models.pass_context import Context, Encoded, PassLayout
from megalith.models.rope import Tables
from megalith.models.transformer import Transformer, layers_of, stacks_of
from megalith.ops.dropout import output_rows
from megalith.parallel.seams import plug
from megalith.parallel.tensor.tensor_parallel import TensorParallel


def apply_ping_pong(model: Transformer, parallel: ParallelConfig, tensor: TensorParallel | None) -> None:
    """Make layers, or only attention, run on two halves of each micro-batch, in place, if the configuration requires
    it.

    `tensor` is None without tensor parallelism.
    """
    if not parallel.overlaps:
        return
    if tensor is None:
        for layer in layers_of(model).values():
            for mixer in layer.mixers:
                plug(mixer, "runner", _ping_pong_attention)
        return
    for stack in stacks_of(model):
        plug(stack, "pass_layout", partial(_pass_layout, stack.pass_layout))
        plug(stack, "runner", _run_ping_pong)
        for layer in stack.layers.values():
            plug(layer, "runner", _run_layer_on_parts)


def interleaving() -> dict[str, Any]:
    """Return Inductor's options for ping-pong layers: order the nodes, and do not reorder them afterwards."""
    from megalith.parallel.overlap.interleave import (
        Interleave,
    )  # imports torch's compiler, which takes seconds

    return {"post_grad_custom_post_pass": Interleave(), "reorder_for_peak_memory": False}


def _ping_pong_attention(forward: Callable[[Tensor, Context], Tensor], x: Tensor, context: Context) -> Tensor:
    """Run attention and its linears on one half of the sequences of x [batch, seq, hidden], then on the other.

    One function serves all layers, so that they share compiled code.
    """
    if context.cache is not None or context.batch % 2:  # generation
        return forward(x, context)
    parts = []
    for number, rows in enumerate(x.flatten(0, 1).chunk(2)):
        half = rows.unflatten(0, (-1, x.shape[1])), _slice_context(context, number, 2, torch.chunk)
        parts.append(forward(*half).flatten(0, 1))
    # Concatenated as rows, as matmuls return them: then Inductor makes the matmuls write into the result directly.
    return torch.cat(parts).unflatten(0, x.shape[:2])


def _pass_layout(
    before: Callable[..., PassLayout],
    tokens: int,
    *,
    trains: bool,
    has_position_ids: bool,
    cp_size: int | None = None,
) -> PassLayout:
    """Return the layout of a forward pass: two halves in training and evaluation, one in generation."""
    layout = before(tokens, trains=trains, has_position_ids=has_position_ids, cp_size=cp_size)
    return replace(layout, micro_batches=2 if trains else 1)


def _run_layer_on_parts(
    forward: Callable[[Tensor, Context], Tensor], parts: Sequence[Tensor], contexts: Sequence[Context]
) -> tuple[Tensor, ...]:
    """Run a layer on each half of the micro-batch. All layers call this function so that they share compiled code."""
    return tuple(forward(x, context) for x, context in zip(parts, contexts, strict=True))


def _run_ping_pong(layers: Sequence[TransformerLayer], x: Tensor, context: Context) -> Tensor:
    """Run x [batch, seq, hidden], or with SP [1, tokens / tp, hidden], through layers as two half micro-batches."""
    sharded, count = context.layout.sharded, context.layout.micro_batches
    stream = _split_stream if sharded else torch.chunk
    parts = tuple(stream(x, count))
    contexts = [_slice_context(context, number, count, stream) for number in range(count)]
    for layer in layers:
        parts = layer(parts, tuple(each.at_layer(layer.number) for each in contexts))
    return torch.cat(parts, 1 if sharded else 0)


Split = Callable[[Tensor, int], Sequence[Tensor]]


def _split_stream(x: Tensor, count: int) -> list[Tensor]:
    """Split a contiguous residual stream [1, tokens, ...] along tokens into [1, tokens / count, ...]."""
    return [part[None] for part in x[0].chunk(count)]


def _slice_context(context: Context, number: int, count: int, stream: Split) -> Context:
    """Return the layer context of split `number` of `count`, which holds a part of the sequences. `stream` splits the
    residual stream.
    """

    def part_of(x: Tensor | None, parts: Split = torch.chunk) -> Tensor | None:
        return None if x is None else parts(x, count)[number]

    def tables(both: Tables | None) -> Tables | None:
        return None if both is None else (part_of(both[0]), part_of(both[1]))

    window_mask = context.window_mask
    if window_mask is not None and window_mask.shape[0] > 1:  # otherwise the same for all sequences
        window_mask = part_of(window_mask)
    dropout, rows = context.dropout, None
    if dropout is not None:
        stream_keys = part_of(dropout.stream, stream)
        dropout = replace(dropout, queries=part_of(dropout.queries), stream=stream_keys, outputs=None)
        if context.layers is not None:
            rows = output_rows(stream_keys, context.layers)
    return replace(
        context,
        batch=context.batch // count,
        position_ids=part_of(context.position_ids),
        rotary=tables(context.rotary),
        rotary_local=tables(context.rotary_local),
        mask=part_of(context.mask),
        documents=part_of(context.documents),
        chunk_mask=part_of(context.chunk_mask),
        chunk_documents=part_of(context.chunk_documents),
        window_mask=window_mask,
        padding=part_of(context.padding),
        dropout=dropout,
        output_rows=rows,
        mtp_embeddings=part_of(context.mtp_embeddings, stream),
        encoded=None if context.encoded is None else _slice_encoded(context.encoded, number, count),
    )


def _slice_encoded(encoded: Encoded, number: int, count: int) -> Encoded:
    stream = _split_stream if encoded.context.layout.sharded else torch.chunk
    mask = None if encoded.mask is None else encoded.mask.chunk(count)[number]
    ends = None if encoded.documents is None else encoded.documents.chunk(count, 1)[number]
    hidden = stream(encoded.hidden, count)[number]
    return Encoded(hidden, _slice_context(encoded.context, number, count, stream), mask, ends)
