"""Ring attention and its all-gather variant: ranks exchange keys and values of a sharded sequence and keep their
queries.

Each rank has an early and a late chunk of the sequence (zigzag.py). With causal attention, rank r's queries attend to
rank s's keys in one of three dense blocks:

    s = r    causal within the local chunks
    s < r    all queries attend to all of the first chunk
    s > r    queries of the second chunk attend to all of both chunks

Each block is half of the square, so all ranks take the same time per ring step. Blocks are merged by their log-sum-exp
(ops/attention_blocks.py). Keys and values are exchanged in one of two ways:

- ring (Liu et al. 2023): each step sends a shard to the next rank while computing with it. In the backward pass the
shards go around again. The gradient of a shard follows one step later and accumulates until it is back at the shard's
rank.
- gather (Llama 3): one all-gather, overlapped with the local block. The backward pass repeats the all-gather and
  reduce-scatters the gradients.

Both are custom operators, so torch.compile does not trace them. Gradients of keys and values accumulate in fp32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from megalith.comm.collectives import begin_group_all_gather
from megalith.compat.torch_operators import functional_collectives as _ops
from megalith.ops.attention_blocks import block_backward, block_forward, merge
from megalith.ops.attention_sink import merge_sink, sink_gradient
from megalith.parallel.context.zigzag import KeyBlock, ShardMasks, from_zigzag, spans, zigzag


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
    documents: Tensor | None = None,  # int32 [batch, documents]: ends in the full sequence
    window: int | None = None,  # maximum number of keys per query, including its own
    softcap: float | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    dropout_rows: Tensor | None = None,  # int32 [batch, seq]
    first_head: int = 0,
    alibi: int | None = None,  # number of heads of the layer, if it uses ALiBi
    sink: Tensor | None = None,  # float32 [heads]: an additional score in the softmax, with no value
) -> Tensor:
    """Compute attention of the local queries over the full sequence. Returns [batch, seq, heads, head_dim]."""
    scores = (window, softcap, scale, alibi)
    arguments = (documents, dropout_rows, *scores, dropout, first_head, size, rank, group, gather, causal)
    if sink is not None:
        return _WithSink.apply(sink, query, key, value, *arguments)
    return _forward(query, key, value, *arguments)[0]


class KVExchange(ABC):
    """Exchange of keys and values among ranks. Sends gradients back to the ranks that the keys and values came from."""

    def __init__(self, pair: Tensor, size: int, rank: int, group: str, causal: bool):
        self.pair, self.size, self.rank, self.group = pair.contiguous(), size, rank, group
        self.seq, self.causal = pair.shape[2], causal
        self.local_shard = KeyBlock(self.pair, spans(rank, size, self.seq), causal=causal)

    @abstractmethod
    def shards(self) -> Iterator[KeyBlock]:
        """Yield the shards that local queries attend to, the local one first. Transfers overlap computation."""

    @abstractmethod
    def send_gradient(self, shard: KeyBlock, grad: Tensor) -> None:
        """Send the float32 gradient [2, batch, keys, groups, head_dim] of another rank's shard to that rank."""

    @abstractmethod
    def local_gradient(self) -> Tensor:
        """Return the sum of the other ranks' gradients of the local shard, in float32. Call it after all sends."""


class _Ring(KVExchange):
    """Point-to-point exchange around the ring of ranks."""

    _in_flight: Tensor | None = None

    def shards(self) -> Iterator[KeyBlock]:
        half = self.seq // 2
        arriving = self._send_to_next(self.pair)
        yield self.local_shard
        for step in range(1, self.size):
            pair = _ops.wait_tensor(arriving)
            if step < self.size - 1:
                arriving = self._send_to_next(pair)
            source = (self.rank - step) % self.size
            early, late = spans(source, self.size, self.seq)
            if not self.causal:
                yield KeyBlock(pair, [early, late])
            elif source < self.rank:
                yield KeyBlock(pair[:, :, :half], [early])
            else:
                yield KeyBlock(pair, [early, late], half)

    def send_gradient(self, shard: KeyBlock, grad: Tensor) -> None:
        # A gradient follows its shard one step later: the one arriving now belongs to the shard just computed.
        if grad.shape[2] < self.seq:
            grad = torch.cat([grad, torch.zeros_like(grad)], dim=2)
        if self._in_flight is not None:
            grad = grad + _ops.wait_tensor(self._in_flight)
        self._in_flight = self._send_to_next(grad)

    def local_gradient(self) -> Tensor:
        return _ops.wait_tensor(self._in_flight)

    def _send_to_next(self, x: Tensor) -> Tensor:
        """Start sending x to the next rank. Return the tensor that will hold the data from the previous rank once the
        transfer is done.
        """
        sent, received = [0] * self.size, [0] * self.size
        sent[(self.rank + 1) % self.size] = received[self.rank - 1] = x.numel()
        return _ops.all_to_all_single(x.flatten(), received, sent, self.group).view(x.shape)


class _Gather(KVExchange):
    """One all-gather, and one reduce-scatter of the gradients."""

    _grad: Tensor | None = None

    def shards(self) -> Iterator[KeyBlock]:
        half, size, rank = self.seq // 2, self.size, self.rank
        gathering = begin_group_all_gather(self.pair, size, self.group)
        yield self.local_shard
        shards = _ops.wait_tensor(gathering).view(size, *self.pair.shape)
        full = from_zigzag(shards, dim=2)  # [2, batch, size · seq, groups, head_dim]
        before = range(rank * half)
        between = range((rank + 1) * half, (2 * size - 1 - rank) * half)
        after = range((2 * size - rank) * half, 0 if self.causal else 2 * size * half)
        for span, first_query in ((before, 0), (between, half if self.causal else 0), (after, 0)):
            if span:
                yield KeyBlock(full[:, :, span.start : span.stop], [span], first_query)

    def send_gradient(self, shard: KeyBlock, grad: Tensor) -> None:
        if self._grad is None:
            batch, _, *rest = self.pair.shape[1:]
            self._grad = grad.new_zeros(2, batch, self.size * self.seq, *rest)
        (span,) = shard.positions
        self._grad[:, :, span.start : span.stop] = grad

    def local_gradient(self) -> Tensor:
        shards = zigzag(self._grad, self.size, dim=2)  # [size, 2, batch, seq, groups, head_dim]
        shards = shards.flatten(0, 1)
        return _ops.wait_tensor(_ops.reduce_scatter_tensor(shards, "sum", self.size, self.group))


def _steps(size: int, gather: bool) -> int:
    """Return the maximum number of blocks that KVExchange.shards yields: the table of random states has a row per
    block.
    """
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
    """Return the output, its log-sum-exp float32 [batch, heads, seq], and random states of kernels int64 [steps, 2]."""
    exchange = (_Gather if gather else _Ring)(torch.stack([key, value]), size, rank, group, causal)
    scores = (window, softcap, scale, alibi)
    query = query.transpose(1, 2)  # [batch, heads, seq, head_dim]
    heads = (first_head, query.shape[1])
    masks = ShardMasks(documents, dropout_rows, *scores, dropout, *heads, exchange.local_shard)
    states = query.new_zeros(_steps(size, gather), 2, dtype=torch.int64)
    out = None
    if masks.by_chunk:
        out = torch.zeros_like(query, dtype=torch.float32)
        lse = out.new_full(query.shape[:3], float("-inf"))
    for step, shard in enumerate(exchange.shards()):
        for part in masks.parts(shard):
            rows, pair = part.queries, shard.pair[:, :, part.keys].transpose(2, 3)
            block = block_forward(query[:, :, rows], *pair, part.block)
            if out is None:
                out, lse = block[0].float(), block[1].contiguous()
            else:
                merge(out[:, :, rows], lse[:, :, rows], *block[:2])
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
def ring_attention_backward(
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
    """Return the gradients of query, key and value."""
    exchange = (_Gather if gather else _Ring)(torch.stack([key, value]), size, rank, group, causal)
    scores = (window, softcap, scale, alibi)
    grad, query, out = (x.transpose(1, 2) for x in (grad, query, out))  # [batch, heads, seq, head_dim]
    heads = (first_head, query.shape[1])
    masks = ShardMasks(documents, dropout_rows, *scores, dropout, *heads, exchange.local_shard)
    d_query = torch.zeros_like(query, dtype=torch.float32)
    for step, shard in enumerate(exchange.shards()):
        d_pair = torch.zeros_like(shard.pair, dtype=torch.float32) if masks.by_chunk else None
        for part in masks.parts(shard):
            rows, pair = part.queries, shard.pair[:, :, part.keys].transpose(2, 3)
            inputs = (query[:, :, rows], *pair, out[:, :, rows], lse[:, :, rows])
            block = block_backward(grad[:, :, rows], *inputs, states[step], part.block)
            d_query[:, :, rows] += block[0]
            d_part = torch.stack([x.transpose(1, 2) for x in block[1:]])  # [2, batch, keys, groups, ·]
            if d_pair is None:
                d_pair = d_part.float()
            else:
                d_pair[:, :, part.keys] += d_part
        if step == 0:
            d_local = d_pair
        else:
            exchange.send_gradient(shard, d_pair)
    d_key, d_value = (x.to(key.dtype, copy=True) for x in d_local + exchange.local_gradient())
    return d_query.transpose(1, 2).to(query.dtype).contiguous(), d_key, d_value


@ring_attention_backward.register_fake
def _(grad, query, key, value, *rest):
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def _save(ctx, inputs, output) -> None:
    query, key, value, documents, dropout_rows, *ctx.plain = inputs
    ctx.save_for_backward(query, key, value, *output, documents, dropout_rows)


def _gradients(ctx, grad: Tensor, _lse: None, _states: None):
    return *ring_attention_backward(grad, *ctx.saved_tensors, *ctx.plain), *[None] * 13


_forward.register_autograd(_gradients, setup_context=_save)


class _WithSink(torch.autograd.Function):
    """Autograd function of ring attention with an attention sink (ops/attention_sink.py)."""

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
        grad_sink = sink_gradient(grad.transpose(1, 2), saved[3].transpose(1, 2), saved[4], sink)
        return grad_sink, *ring_attention_backward(grad, *saved, *ctx.plain), *[None] * 13
