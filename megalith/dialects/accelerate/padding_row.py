"""Excludes the padding token's row of the embedding from training, like padding_idx of nn.Embedding."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalith.models.pass_context import Context
from megalith.models.vocabulary import Embedding
from megalith.parallel.tensor.vocab_parallel import VocabParallel


def exclude_padding_row(chunks: Iterable[nn.Module], padding_idx: int | None) -> None:
    """Leave the row `padding_idx` out of the gradient of the embedding's lookup, in place; None changes nothing.

    A tied output matrix trains the row, as in transformers.
    """
    if padding_idx is None:
        return
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Embedding):
                vocabulary = getattr(module.lookup, "__self__", None)  # of a bound method
                first = vocabulary.first if isinstance(vocabulary, VocabParallel) else 0
                module.lookup = partial(_lookup, module.lookup, padding_idx - first)


def _lookup(lookup: Any, row: int, input_ids: Tensor, weight: Tensor, context: Context) -> Tensor:
    if 0 <= row < weight.shape[0]:
        weight = _WithoutRow.apply(weight, row)
    return lookup(input_ids, weight, context)


class _WithoutRow(torch.autograd.Function):
    """The identity, whose gradient is zero in one row."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, row: int) -> Tensor:
        ctx.row = row
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        gradient[ctx.row] = 0
        return gradient, None
