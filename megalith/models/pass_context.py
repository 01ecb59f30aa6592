"""What every layer needs to know of the tokens it is given, made once for all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megalith.models.cache import KVCache
from megalith.models.rope import Tables
from megalith.ops.dropout import DropoutKeys


@dataclass
class Context:
    """Positions, mask, dropout keys and cache of a forward pass."""

    batch: int  # sequences; the residual stream may hold their tokens in one row, or a part of them
    rotary: Tables | None = None
    rotary_local: Tables | None = None  # of layers with a window, where they have a base of their own
    mask: Any = (
        None  # what the attention core understands, by default bool [batch, 1, queries, keys]; None: causal
    )
    dropout: DropoutKeys | None = None  # None: no dropout
    layers: Tensor | None = None  # the numbers of the layers, int32 [num_layers], where there is dropout
    output_rows: Tensor | None = None  # int32 [num_layers, 2, …]: see ops.dropout.output_rows
    cache: KVCache | None = None  # None: every token is here
    numbers: Tensor | None = (
        None  # int64 [tokens of the stream]: place · batch + sequence, where there are experts
    )
    upcoming: Tensor | None = (
        None  # [batch, seq, hidden]: embeddings of the tokens that a further layer is told
    )
    balance_scale: Tensor | None = (
        None  # factor of the balancing losses' gradient; None: no backward pass follows
    )

    def at_layer(self, number: int) -> Context:
        """This context with a layer's number in its dropout keys: a tensor, so that layers share compiled code."""
        if self.dropout is None:
            return self
        dropout = replace(self.dropout, layer=self.layers[number], outputs=self.output_rows[number])
        return replace(self, layers=None, output_rows=None, dropout=dropout)
