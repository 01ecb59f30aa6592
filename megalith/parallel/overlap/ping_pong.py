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
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from megalith.config import ParallelConfig
from megalith.models.layer import TransformerLayer
from megalith.models.mixers.attention import Attention
from megalith.models.pass_context import Context
from megalith.models.rope import Tables
from megalith.models.transformer import Transformer
from megalith.ops.dropout import output_rows
from megalith.parallel.tensor.tensor_parallel import TensorParallel


def apply_halves(model: Transformer, parallel: ParallelConfig, tensor: TensorParallel | None) -> None:
    """Lets `model`, in place, run its layers, or attention alone, on two halves of each micro-batch, where the
    configuration says so. `tensor` None: there is no tensor parallelism."""
    if not parallel.tp_comm_overlap:
        return
    if tensor is None:
        for layer in model.layers.values():
            layer.self_attention.__class__ = _half_by_half(type(layer.self_attention))
        return
    halves = Halves(model, tensor)
    model.register_forward_pre_hook(halves.choose, with_kwargs=True)
    model.run_layers = halves.run_layers
    for layer in model.layers.values():
        layer.__class__ = _side_by_side(type(layer))


def interleaving() -> dict[str, Any]:
    """What Inductor is told of layers that run halves: the order of their nodes, and to leave it as it is."""
    from megalith.parallel.overlap.interleave import Interleave  # imports torch's compiler: seconds

    return {"post_grad_custom_post_pass": Interleave(), "reorder_for_peak_memory": False}


@cache
def _side_by_side(kind: type[TransformerLayer]) -> type[TransformerLayer]:
    """The same kind of layer for both halves at once; one class, so that all layers share compiled code."""

    class SideBySide(kind):
        def forward(self, x: tuple[Tensor, ...], context: tuple[Context, ...]) -> tuple[Tensor, ...]:
            return tuple(super(SideBySide, self).forward(*half) for half in zip(x, context, strict=True))

    return SideBySide


@cache
def _half_by_half(kind: type[Attention]) -> type[Attention]:
    """The same kind of attention, its linears included, for one half of the sequences and then for the other."""

    class HalfByHalf(kind):
        def forward(self, x: Tensor, context: Context, *rest: bool) -> Tensor:  # [batch, seq, hidden]
            if context.cache is not None or context.batch % 2:  # generation
                return super().forward(x, context, *rest)
            forward = super().forward
            parts = []
            for number, rows in enumerate(x.flatten(0, 1).chunk(2)):
                half = rows.unflatten(0, (-1, x.shape[1])), _part(context, number, 2, torch.chunk)
                parts.append(forward(*half, *rest).flatten(0, 1))
            # joined as rows, for so they are products' results: Inductor lets those write to their places
            return torch.cat(parts).unflatten(0, x.shape[:2])

    return HalfByHalf


class Halves:
    """Wraps Transformer.run_layers."""

    def __init__(self, model: Transformer, tensor: TensorParallel):
        self._layers, self._tensor = model.layers, tensor

    def choose(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """Before a forward pass: training and evaluation run in halves, generation does not."""
        self._tensor.halves = 1 if kwargs.get("labels") is None else 2

    def run_layers(self, numbers: Sequence[str], x: Tensor, context: Context) -> Tensor:
        """x [batch, seq, hidden], or with SP [1, tokens / tp, hidden], through the layers with these numbers."""
        cut, count = self._tensor.tokens_are_cut, self._tensor.halves
        stream = _stream_parts if cut else torch.chunk
        parts = tuple(stream(x, count))
        contexts = [_part(context, number, count, stream) for number in range(count)]
        for number in numbers:
            parts = self._layers[number](parts, tuple(c.at_layer(int(number)) for c in contexts))
        return torch.cat(parts, 1 if cut else 0)


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
    )
