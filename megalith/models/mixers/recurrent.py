"""Base class of mixers with a fixed-size state per sequence: delta nets, state space models, convolutions.

Attention stores keys and values of all tokens. These mixers store the inputs of a short convolution for the last
tokens, and most of them one matrix per head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalith.local_shards import local
from megalith.models.identity import identity
from megalith.models.pass_context import Context
from megalith.models.runnable import Runnable
from megalith.ops.causal_conv import causal_conv
from megalith.ops.documents import document_ids


class StateSizes(NamedTuple):
    """Sizes of a sequence's state in one layer, for the heads on this rank."""

    taps: int  # width of the convolution in tokens, the current one included
    units: int  # of the convolution
    matrices: tuple[int, int, int] | None  # heads and the size of one head's matrix, None without
    inputs: int = 0  # numbers per token that the recurrence reads


class Recurrent(Runnable):
    """Base class of mixers with a recurrent state. `convolution`, `recurrence` and `document_numbers` are seams of
    context parallelism, the first two also of batch invariance."""

    def __init__(self, recurrence: Callable[..., Tensor] | None = None):
        """Set the recurrence, a function of its inputs and of document numbers. None means only a convolution."""
        super().__init__()
        self.convolution: Callable[..., Tensor] = causal_conv
        self.recurrence = recurrence
        self.document_numbers: Callable[[Tensor, int], Tensor] = document_ids

    @property
    def state_sizes(self) -> StateSizes:
        """Sizes of the state that generation stores per sequence."""
        raise NotImplementedError(f"{type(self).__name__} does not implement state_sizes")

    def documents(self, context: Context, seq: int) -> Tensor | None:
        """Return the document number of each token, int32 [batch, seq]. None means one document per sequence."""
        if context.documents is None:
            return None
        number_documents = document_ids if context.layout.full_sequence else self.document_numbers
        return number_documents(context.documents, seq)

    def convolve(
        self,
        x: Tensor,
        taps: Tensor,
        bias: Tensor | None,
        documents: Tensor | None,
        context: Context,
    ) -> Tensor:
        """Return ops.causal_conv applied to x [batch, seq, units].

        In generation, the cache holds the tokens before x.
        """
        if context.padding is not None:
            x = x.masked_fill(context.padding[..., None], 0.0)
        if context.cache is not None:
            return context.cache.convolve(x, taps, bias)
        convolution = self.convolution
        if context.layout.full_sequence:
            convolution = partial(convolution, full_sequence=True)
        return convolution(x, taps, documents, bias)

    def recurrence_of(self, context: Context) -> Callable[..., Tensor]:
        """Return the recurrence to use in a forward pass without a cache."""
        if context.layout.full_sequence:
            return partial(self.recurrence, full_sequence=True)
        return self.recurrence


def sum_squares(x: Tensor) -> Tensor:
    """Return the sum of squares over the last dimension, [..., 1]."""
    return x.square().sum(-1, keepdim=True)


class OutputNorm(nn.Module):
    """Base class of RMSNorms of a mixer's output, with a gate and `size` weights.

    `total` is a seam: the sum of squares along the last dimension, over all ranks.
    """

    total: Callable[[Tensor], Tensor] = staticmethod(sum_squares)

    def __init__(self, size: int, epsilon: float, device: torch.device | None = None):
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(size, device=device))


class UnitConvolution(nn.Module):
    """The weights of a causal depthwise convolution: taps for each unit. `rows` is a seam, as in Linear."""

    def __init__(self, units: int, taps: int, bias: bool, device: torch.device | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(units, 1, taps, device=device))
        self.bias = nn.Parameter(torch.empty(units, device=device)) if bias else None
        self.rows: Callable[[Tensor], Tensor] = identity

    def taps(self) -> Tensor:
        """Return the taps of this rank's units [units, 1, taps]."""
        return self.rows(local(self.weight))

    def local_bias(self) -> Tensor | None:
        """Return the bias of this rank's units [units], or None if there is none."""
        return None if self.bias is None else self.rows(local(self.bias))
