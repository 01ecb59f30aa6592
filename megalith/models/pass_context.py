"""What a pass through the model carries: how its tokens stand here, and what every layer needs to know of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megalith.models.cache import KVCache
from megalith.models.rope import Tables
from megalith.ops.dropout import DropoutKeys


@dataclass(frozen=True)
class PassLayout:
    """How the tokens of one pass stand on this rank. On one device they are all there, in order."""

    sharded: bool = False  # the residual stream holds this rank's share of the tokens: sequence parallelism
    micro_batches: int = 1  # that the sequences are cut into, side by side, each sharded by itself
    sequence_parts: int = 1  # that each sequence is cut into, one of which is here: context parallelism
    whole_sequences: bool = False  # though context parallelism could cut them: generation


def one_device(tokens: int, *, trains: bool, has_places: bool) -> PassLayout:
    """The layout of a pass over so many tokens; `trains`: with labels, `has_places`: told where its tokens stand."""
    return PassLayout()


@dataclass
class Context:
    """Layout, positions, mask, dropout keys and cache of a forward pass."""

    batch: int  # sequences; the residual stream may hold their tokens in one row, or a part of them
    layout: PassLayout = PassLayout()
    causal: bool = True  # whether a token sees those before it alone
    rotary: Tables | None = None
    rotary_local: Tables | None = None  # of layers with a window, where they have a base of their own
    mask: Any = None  # what the core takes, by default bool [batch, 1, queries, keys]; None: as `causal` says
    dropout: DropoutKeys | None = None  # None: no dropout
    layers: Tensor | None = None  # the numbers of the layers, int32 [num_layers], where there is dropout
    output_rows: Tensor | None = None  # int32 [num_layers, 2, …]: see ops.dropout.output_rows
    cache: KVCache | None = None  # None: every token is here
    numbers: Tensor | None = None  # int64 [tokens of the stream]: place · batch + sequence, for experts
    upcoming: Tensor | None = None  # [batch, seq, hidden]: embeddings of the tokens that an MTP layer is told
    balance_scale: Tensor | None = None  # of the balancing losses' gradient; None: no backward pass follows

    def at_layer(self, number: int) -> Context:
        """This context with a layer's number in its dropout keys: a tensor, so that layers share compiled code."""
        if self.dropout is None:
            return self
        dropout = replace(self.dropout, layer=self.layers[number], outputs=self.output_rows[number])
        return replace(self, layers=None, output_rows=None, dropout=dropout)


def own_tokens(x: Tensor, context: Context | None) -> Tensor:
    """What ranks that share heads or units use of x: what is here. Tensor parallelism has it gathered."""
    return x
