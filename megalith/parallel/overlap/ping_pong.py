"""A micro-batch as two halves of its sequences, side by side: while one half's collective is under way, the other
computes (as in Domino, Wang et al. 2024).

With tensor parallelism each layer is given both halves and goes through one and then the other, each as if it were the
micro-batch; nothing in the layer knows. Compiled, that is one graph of two chains without an edge between them, and
interleave.py puts its nodes in such an order that a collective of either has products of the other to hide behind,
forward and backward. Not compiled, the halves run one behind the other and nothing is gained.

With context parallelism alone nothing but attention talks, and so attention and its matrices are all that goes through
one half and then the other, as a part of the layer's graph. Norms and MLP take the micro-batch whole: larger products,
and gradients of weights over more tokens, run better.

Weights are gathered once for both (a layer is FSDP's unit), their gradients summed in the layer's backward pass. What
stands before the layers and behind them takes the micro-batch whole. With sequence parallelism each half is cut over
the ranks by itself, so a rank's share of the stream is its share of one half and then of the other.
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
from megalith.models.stack import layers_of, stacks_of
from megalith.models.transformer import Transformer
from megalith.ops.dropout import output_rows
from megalith.parallel.seams import plug
from megalith.parallel.tensor.tensor_parallel import TensorParallel


def apply_halves(model: Transformer, parallel: ParallelConfig, tensor: TensorParallel | None) -> None:
    """Lets `model`, in place, run its layers, or attention alone, on two halves of each micro-batch, where the
    configuration says so. `tensor` None: there is no tensor parallelism."""
    if not parallel.tp_comm_overlap:
        return
    if tensor is None:
        for layer in layers_of(model).values():
            for mixer in layer.mixers:
                plug(mixer, "runner", _half_by_half)
        return
    for stack in stacks_of(model):
        plug(stack, "pass_layout", partial(_pass_layout, stack.pass_layout))
        plug(stack, "runner", _run_side_by_side)


def interleaving() -> dict[str, Any]:
    """What Inductor is told of layers that run halves: the order of their nodes, and to leave it as it is."""
    from megalith.parallel.overlap.interleave import Interleave  # imports torch's compiler: seconds

    return {"post_grad_custom_post_pass": Interleave(), "reorder_for_peak_memory": False}


def _half_by_half(forward: Callable[[Tensor, Context], Tensor], x: Tensor, context: Context) -> Tensor:
    """A runner of attention, its linears included, for one half of the sequences and then for the other: x [batch, seq,
    hidden]. One function for all layers, so that they share compiled code."""
    if context.cache is not None or context.batch % 2:  # generation
        return forward(x, context)
    parts = []
    for number, rows in enumerate(x.flatten(0, 1).chunk(2)):
        half = rows.unflatten(0, (-1, x.shape[1])), _part(context, number, 2, torch.chunk)
        parts.append(forward(*half).flatten(0, 1))
    # joined as rows, for so they are results of matmuls: Inductor lets those write to their places
    return torch.cat(parts).unflatten(0, x.shape[:2])


def _pass_layout(
    before: Callable[..., PassLayout], tokens: int, *, trains: bool, has_places: bool
) -> PassLayout:
    """Training and evaluation run in halves, generation does not."""
    layout = before(tokens, trains=trains, has_places=has_places)
    return replace(layout, micro_batches=2 if trains else 1)


def _run_side_by_side(layers: Sequence[TransformerLayer], x: Tensor, context: Context) -> Tensor:
    """x [batch, seq, hidden], or with SP [1, tokens / tp, hidden], in parts through these layers."""
    sharded, count = context.layout.sharded, context.layout.micro_batches
    stream = _stream_parts if sharded else torch.chunk
    parts = tuple(stream(x, count))
    contexts = [_part(context, number, count, stream) for number in range(count)]
    for layer in layers:
        parts = layer(parts, tuple(each.at_layer(layer.number) for each in contexts))
    return torch.cat(parts, 1 if sharded else 0)


Parts = Callable[[Tensor, int], Sequence[Tensor]]


def _stream_parts(x: Tensor, count: int) -> list[Tensor]:
    """Parts of a stream that is one row, [1, tokens, ...], with the strides of such rows."""
    return [part[None] for part in x[0].chunk(count)]


def _part(context: Context, number: int, count: int, stream: Parts) -> Context:
    """What layers need to know of one of `count` parts of the sequences, where `stream` gives those of the stream."""

    def own(x: Tensor | None, parts: Parts = torch.chunk) -> Tensor | None:
        return None if x is None else parts(x, count)[number]

    def tables(both: Tables | None) -> Tables | None:
        return None if both is None else (own(both[0]), own(both[1]))

    dropout, rows = context.dropout, None
    if dropout is not None:
        stream_keys = own(dropout.stream, stream)
        dropout = replace(dropout, queries=own(dropout.queries), stream=stream_keys, outputs=None)
        if context.layers is not None:
            rows = output_rows(stream_keys, context.layers)
    return replace(
        context,
        batch=context.batch // count,
        rotary=tables(context.rotary),
        rotary_local=tables(context.rotary_local),
        mask=own(context.mask),
        dropout=dropout,
        output_rows=rows,
        upcoming=own(context.upcoming, stream),
        encoded=None if context.encoded is None else _encoded_part(context.encoded, number, count),
    )


def _encoded_part(encoded: Encoded, number: int, count: int) -> Encoded:
    stream = _stream_parts if encoded.context.layout.sharded else torch.chunk
    mask = None if encoded.mask is None else encoded.mask.chunk(count)[number]
    return Encoded(stream(encoded.hidden, count)[number], _part(encoded.context, number, count, stream), mask)
