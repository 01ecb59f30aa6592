"""Attention over a sequence that is sharded over ranks: keys and values are sent, queries stay.

Each rank has an early and a late chunk of the sequence (zigzag.py). What rank r's queries see of rank s's keys where
attention is causal is then one of three dense blocks:

    s = r    the causal block: both chunks are in order
    s < r    all queries see the whole first chunk, and none the second
    s > r    queries of the second chunk see both chunks whole, and those of the first see none

Each is half of the square, so every ring step takes every rank the same time. An encoder's queries see all keys of
every rank. Under a window a block is a pair of chunks, of which only those queries and keys are computed that are
near enough: of two different chunks at most as many as the window has. Blocks are merged by their log-sum-exp
(ops/attention_blocks.py). Keys and values reach a rank by one of two ways:

- ring (Liu et al. 2023): a shard is sent to the next rank while it is computed with, size − 1 times. In the backward
  pass the shards go around again, each one's gradient one step behind it, accumulating on the way, until it is home.
- gather (Llama 3): one all-gather, overlapped with the rank's own block; in the backward pass the all-gather again, and
  one reduce-scatter of the gradients.

Both are a pair of custom ops, so that torch.compile takes them as they are and the communication is hidden from it.
Gradients of keys and values are accumulated in float32. Each rank's group is named by a string.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from megalith.comm.collectives import begin_group_all_gather
from megalith.ops.attention_blocks import block_backward, block_forward, merge
from megalith.ops.attention_sink import merge_sink, sink_gradient
from megalith.parallel.context.zigzag import KeyBlock, ShardMasks, from_zigzag, spans, zigzag

_ops = torch.ops._c10d_functional


def ring_attention(
    query: Tensor,  # [batch, seq, heads, head_dim]: this rank's chunks
    key: Tensor,  # [batch, seq, groups, head_dim]
    value: Tensor,  # [batch, seq, groups, head_dim]
    *,
    size: int,
    rank: int,
    group: str,
    gather: bool,
    causal: bool = True,
    documents: Tensor | None = None,  # int32 [batch, documents], the ends in the whole sequence
    window: int | None = None,  # the keys that a query sees at most, its own included
    softcap: float | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    dropout_rows: Tensor | None = None,  # int32 [batch, seq]
    first_head: int = 0,
    alibi: int | None = None,  # the number of all of the layer's heads, where they have ALiBi
    sink: Tensor | None = None,  # float32 [heads]: a score beside those of the keys, of nothing
) -> Tensor:
    """Attention of this rank's queries over the whole sequence: [batch, seq, heads, head_dim]."""
    scores = (window, softcap, scale, alibi)
    arguments = (documents, dropout_rows, *scores, dropout, first_head, size, rank, group, gather, causal)
    if sink is not None:
        return _WithSink.apply(sink, query, key, value, *arguments)
    return _forward(query, key, value, *arguments)[0]


class _Route(ABC):
    """How keys and values come to this rank, and their gradients go home."""

    def __init__(self, pair: Tensor, size: int, rank: int, group: str, causal: bool):
        self.pair, self.size, self.rank, self.group = pair.contiguous(), size, rank, group
        self.seq, self.causal = pair.shape[2], causal
        self.own_shard = KeyBlock(self.pair, spans(rank, size, self.seq), causal=causal)

    @abstractmethod
    def shards(self) -> Iterator[KeyBlock]:
        """The shards that this rank's queries see, its own first. More are under way while one is computed with."""

    @abstractmethod
    def send(self, shard: KeyBlock, grad: Tensor) -> None:
        """Takes the float32 gradient [2, batch, keys, groups, head_dim] of a shard that is not this rank's own."""

    @abstractmethod
    def arrived(self) -> Tensor:
        """What all other ranks gave for this rank's own shard, when all is sent: float32, in its shape."""


class _Ring(_Route):
    """From rank to rank."""

    _travelling: Tensor | None = None

    def shards(self) -> Iterator[KeyBlock]:
        half = self.seq // 2
        coming = self._pass_on(self.pair)
        yield self.own_shard
        for step in range(1, self.size):
            pair = _ops.wait_tensor(coming)
            if step < self.size - 1:
                coming = self._pass_on(pair)
            source = (self.rank - step) % self.size
            early, late = spans(source, self.size, self.seq)
            if not self.causal:
                yield KeyBlock(pair, [early, late])
            elif source < self.rank:
                yield KeyBlock(pair[:, :, :half], [early])
            else:
                yield KeyBlock(pair, [early, late], half)

    def send(self, shard: KeyBlock, grad: Tensor) -> None:
        # The gradient of a shard follows it one step later: what comes now is for the shard that was just computed.
        if grad.shape[2] < self.seq:
            grad = torch.cat([grad, torch.zeros_like(grad)], dim=2)
        if self._travelling is not None:
            grad = grad + _ops.wait_tensor(self._travelling)
        self._travelling = self._pass_on(grad)

    def arrived(self) -> Tensor:
        return _ops.wait_tensor(self._travelling)

    def _pass_on(self, x: Tensor) -> Tensor:
        """Sends x to the next rank; gives, once waited for, what the rank before sends."""
        to, out_of = [0] * self.size, [0] * self.size
        to[(self.rank + 1) % self.size] = out_of[self.rank - 1] = x.numel()
        return _ops.all_to_all_single(x.flatten(), out_of, to, self.group).view(x.shape)


class _Gather(_Route):
    """All to all at once."""

    _grad: Tensor | None = None

    def shards(self) -> Iterator[KeyBlock]:
        half, size, rank = self.seq // 2, self.size, self.rank
        coming = begin_group_all_gather(self.pair, size, self.group)
        yield self.own_shard
        shards = _ops.wait_tensor(coming).view(size, *self.pair.shape)
        whole = from_zigzag(shards, dim=2)  # [2, batch, size · seq, groups, head_dim]
        before = range(rank * half)
        between = range((rank + 1) * half, (2 * size - 1 - rank) * half)
        behind = range((2 * size - rank) * half, 0 if self.causal else 2 * size * half)
        for places, first_query in ((before, 0), (between, half if self.causal else 0), (behind, 0)):
            if places:
                yield KeyBlock(whole[:, :, places.start : places.stop], [places], first_query)

    def send(self, shard: KeyBlock, grad: Tensor) -> None:
        if self._grad is None:
            batch, _, *rest = self.pair.shape[1:]
            self._grad = grad.new_zeros(2, batch, self.size * self.seq, *rest)
        (places,) = shard.places
        self._grad[:, :, places.start : places.stop] = grad

    def arrived(self) -> Tensor:
        shards = zigzag(self._grad, self.size, dim=2)  # [size, 2, batch, seq, groups, head_dim]
        shards = shards.flatten(0, 1)
        return _ops.wait_tensor(_ops.reduce_scatter_tensor(shards, "sum", self.size, self.group))


def _steps(size: int, gather: bool) -> int:
    """Rows in the table of random states: at most so many shards."""
    return 4 if gather else size


@torch.library.custom_op(
    "megalith::ring_attention", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None,
    dropout_rows: Tensor | None,
    window: int | None,
    softcap: float | None,
    scale: float | None,
    alibi: int | None,
    dropout: float,
    first_head: int,
    size: int,
    rank: int,
    group: str,
    gather: bool,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Result, its log-sum-exp float32 [batch, heads, seq], and the kernels' random states int64 [steps, 2]."""
    route = (_Gather if gather else _Ring)(torch.stack([key, value]), size, rank, group, causal)
    scores = (window, softcap, scale, alibi)
    query = query.transpose(1, 2)  # [batch, heads, seq, head_dim]
    heads = (first_head, query.shape[1])
    masks = ShardMasks(documents, dropout_rows, *scores, dropout, *heads, route.own_shard)
    states = query.new_zeros(_steps(size, gather), 2, dtype=torch.int64)
    out = None
    if masks.by_chunk:
        out = torch.zeros_like(query, dtype=torch.float32)
        lse = out.new_full(query.shape[:3], float("-inf"))
    for step, shard in enumerate(route.shards()):
        for part in masks.parts(shard):
            seen, pair = part.queries, shard.pair[:, :, part.keys].transpose(2, 3)
            block = block_forward(query[:, :, seen], *pair, part.block)
            if out is None:
                out, lse = block[0].float(), block[1].contiguous()
            else:
                merge(out[:, :, seen], lse[:, :, seen], *block[:2])
            if block[2] is not None:
                states[step] = block[2]
    return out.transpose(1, 2).to(query.dtype).contiguous(), lse, states


@_forward.register_fake
def _(query, key, value, documents, rows, window, softcap, scale, alibi, dropout, first, size, rank, *rest):
    _, gather, _ = rest
    batch, seq, heads, _ = query.shape
    lse = query.new_empty(batch, heads, seq, dtype=torch.float32)
    states = query.new_empty(_steps(size, gather), 2, dtype=torch.int64)
    return query.new_empty(query.shape), lse, states


@torch.library.custom_op("megalith::ring_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    states: Tensor,
    documents: Tensor | None,
    dropout_rows: Tensor | None,
    window: int | None,
    softcap: float | None,
    scale: float | None,
    alibi: int | None,
    dropout: float,
    first_head: int,
    size: int,
    rank: int,
    group: str,
    gather: bool,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    route = (_Gather if gather else _Ring)(torch.stack([key, value]), size, rank, group, causal)
    scores = (window, softcap, scale, alibi)
    grad, query, out = (x.transpose(1, 2) for x in (grad, query, out))  # [batch, heads, seq, head_dim]
    heads = (first_head, query.shape[1])
    masks = ShardMasks(documents, dropout_rows, *scores, dropout, *heads, route.own_shard)
    d_query = torch.zeros_like(query, dtype=torch.float32)
    for step, shard in enumerate(route.shards()):
        d_pair = torch.zeros_like(shard.pair, dtype=torch.float32) if masks.by_chunk else None
        for part in masks.parts(shard):
            seen, pair = part.queries, shard.pair[:, :, part.keys].transpose(2, 3)
            mine = (query[:, :, seen], *pair, out[:, :, seen], lse[:, :, seen])
            block = block_backward(grad[:, :, seen], *mine, states[step], part.block)
            d_query[:, :, seen] += block[0]
            d_part = torch.stack([x.transpose(1, 2) for x in block[1:]])  # [2, batch, keys, groups, ·]
            if d_pair is None:
                d_pair = d_part.float()
            else:
                d_pair[:, :, part.keys] += d_part
        if step == 0:
            d_own = d_pair
        else:
            route.send(shard, d_pair)
    d_key, d_value = (x.to(key.dtype, copy=True) for x in d_own + route.arrived())
    return d_query.transpose(1, 2).to(query.dtype).contiguous(), d_key, d_value


@_backward.register_fake
def _(grad, query, key, value, *rest):
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def _save(ctx, inputs, output) -> None:
    query, key, value, documents, dropout_rows, *ctx.plain = inputs
    ctx.save_for_backward(query, key, value, *output, documents, dropout_rows)


def _gradients(ctx, grad: Tensor, _lse: None, _states: None):
    return *_backward(grad, *ctx.saved_tensors, *ctx.plain), *[None] * 13


_forward.register_autograd(_gradients, setup_context=_save)


class _WithSink(torch.autograd.Function):
    """As ops.attention_sink.SinkAttention, of a ring."""

    @staticmethod
    def forward(ctx, sink: Tensor, query: Tensor, key: Tensor, value: Tensor, *arguments) -> Tensor:
        out, lse, states = _forward(query, key, value, *arguments)
        out, lse = merge_sink(out.transpose(1, 2), lse, sink)
        out = out.transpose(1, 2)
        documents, dropout_rows, *ctx.plain = arguments
        ctx.save_for_backward(sink, query, key, value, out, lse, states, documents, dropout_rows)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        sink, *saved = ctx.saved_tensors
        of_sink = sink_gradient(grad.transpose(1, 2), saved[3].transpose(1, 2), saved[4], sink)
        return of_sink, *_backward(grad, *saved, *ctx.plain), *[None] * 13
