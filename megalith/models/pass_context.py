"""Context of a forward pass: the layout of its tokens on this rank, and the inputs that every layer reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from megalith.models.cache import Cache
from megalith.models.rope import Tables
from megalith.ops.dropout import DropoutKeys


@dataclass(frozen=True)
class PassLayout:
    """How the tokens of one pass stand on this rank. On one device they are all there, in order."""

    sharded: bool = False  # the residual stream holds this rank's share of the tokens: sequence parallelism
    micro_batches: int = 1  # that the sequences are cut into, side by side, each sharded by itself
    cp_size: int = 1  # that each sequence is cut into, one of which is here: context parallelism
    full_sequence: bool = False  # though context parallelism could cut them: generation


def one_device(tokens: int, *, trains: bool, has_position_ids: bool) -> PassLayout:
    """The layout of a pass over so many tokens; `trains`: with labels, `has_position_ids`: given them."""
    return PassLayout()


@dataclass
class Context:
    """Layout, positions, mask, dropout keys and cache of a forward pass."""

    batch: int  # sequences; the residual stream may hold their tokens in one row, or a part of them
    layout: PassLayout  # without a default: compilers of torch 2.11 cannot take one that is an object
    causal: bool = True  # whether a token sees those before it alone
    position_ids: Tensor | None = None  # int64 [batch, seq]
    rotary: Tables | None = None
    rotary_local: Tables | None = None  # of layers with a window, where they have a base of their own
    mask: Tensor | None = (
        None  # bool [batch, 1, queries, keys], True where a query may look, of whole sequences; None: as `causal` says
    )
    bias: Tensor | None = (
        None  # float32 [1, heads, queries, keys] of the scores here, added to self-attention's: relative positions
    )
    documents: Tensor | None = (
        None  # int32 [batch, documents] (ops/documents.py), of whole sequences everywhere
    )
    padding: Tensor | None = None  # bool [batch, seq] of the tokens here, as a Batch has it
    dropout: DropoutKeys | None = None  # None: no dropout
    layers: Tensor | None = None  # the numbers of the layers, int32 [num_layers], where there is dropout
    output_rows: Tensor | None = None  # int32 [num_layers, 2, …]: see ops.dropout.output_rows
    cache: Cache | None = None  # None: every token is here
    global_token_ids: Tensor | None = (
        None  # int64 [tokens of the stream]: token_index · batch + sequence, for experts
    )
    mtp_embeddings: Tensor | None = (
        None  # [batch, seq, hidden]: embeddings of the tokens that are an MTP layer's input
    )
    max_label_tokens: int | None = (
        None  # tokens here with a label that counts, at most; None: that is not known
    )
    balance_scale: Tensor | None = None  # of the balancing losses' gradient; None: no backward pass follows
    encoded: Encoded | None = None  # the other sequence that cross-attention attends to

    def without_padding(self, value: Tensor) -> Tensor:
        """Return attention's values [batch, seq, heads, head_dim] with zeros for tokens of padding: what sees those
        alone gets zeros."""
        return value if self.padding is None else value.masked_fill(self.padding[:, :, None, None], 0.0)

    def at_layer(self, number: int) -> Context:
        """This context with a layer's cache, and its number in the dropout keys: a tensor, so that layers share
        compiled code."""
        cache = None if self.cache is None else self.cache.at_layer(number)
        if self.dropout is None:
            return self if cache is None else replace(self, cache=cache)
        dropout = replace(self.dropout, layer=self.layers[number], outputs=self.output_rows[number])
        return replace(self, cache=cache, layers=None, output_rows=None, dropout=dropout)


@dataclass(frozen=True)
class Encoded:
    """What a stack has made of another sequence, for cross-attention to attend to."""

    hidden: Tensor  # [batch, keys, hidden], as the residual stream of its own pass
    context: Context  # of that pass
    mask: Tensor | None = None  # bool [batch, 1, queries or 1, keys], True where a query may look; None: all
    documents: Tensor | None = (
        None  # int32 [2, batch, documents], the ends of the queries' and of the keys'; None: one
    )
