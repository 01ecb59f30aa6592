"""Ulysses (Jacobs et al. 2023), the a2a of context parallelism: an all-to-all of tokens for heads, and back.

After the exchange a rank has the full sequence for some heads. Cross-attention (T5) always uses it: queries and keys
are each sharded along their own sequence, and after the exchange a rank has full sequences of both. Relative position
biases are then computed for the local heads only.

With NCCL or gloo, shards are packed, sent and unpacked. Copy engines (copy_engine_heads.py) copy them to their final
addresses without packing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.comm.collectives import Axis, all_to_all, wait
from megalith.ops.split_qkv import split_heads
from megalith.parallel.context.zigzag import from_zigzag, zigzag


def heads_from_tokens(query: Tensor, key: Tensor, value: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange local tokens of all heads for all tokens of local heads, in order, in one all-to-all.

    Maps [batch, seq, heads, head_dim] to [batch, size · seq, heads / size, head_dim]. If size does not divide the key
    and value heads, they are first repeated to the smallest multiple; gradients of repeated heads are summed.
    """
    if axis.size == 1:
        return query, key, value
    groups = key.shape[2]
    copies = math.lcm(groups, axis.size) // groups
    if copies > 1:
        key, value = key.repeat_interleave(copies, dim=2), value.repeat_interleave(copies, dim=2)
    if query.shape[1] == key.shape[1]:
        return _exchange([query, key, value], axis)
    (query,) = _exchange([query], axis)  # cross-attention: the sequences have different lengths
    (both,) = _exchange([torch.cat([key, value], dim=-1)], axis)
    return query, *both.chunk(2, dim=-1)


def tokens_from_heads(out: Tensor, axis: Axis) -> Tensor:
    """Invert the exchange: [batch, size · seq, heads / size, head_dim] -> [batch, seq, heads, head_dim]."""
    if axis.size == 1:
        return out
    if axis.uses_copy_engine(out):
        return _TokensFromHeads.apply(out, axis)
    return all_to_all(zigzag(out, axis.size, dim=1), axis).movedim(0, 2).flatten(2, 3)


def _exchange(xs: list[Tensor], axis: Axis) -> Sequence[Tensor]:
    """Exchange one tensor, or queries, keys and values, each [batch, seq, heads, head_dim], in one all-to-all."""
    if axis.uses_copy_engine(xs[0]):
        return _HeadsFromTokens.apply(axis, *xs)
    shards = [x.unflatten(2, (axis.size, -1)) for x in xs]  # [batch, seq, size, heads, head_dim]
    exchanged = all_to_all(
        torch.cat(shards, dim=3).movedim(2, 0), axis
    )  # [size, batch, seq, heads, head_dim]
    return from_zigzag(exchanged, dim=1).split([shard.shape[3] for shard in shards], dim=2)


class _HeadsFromTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, axis: Axis, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        heads = wait(torch.ops.megalith_copy_engine.heads_from_tokens(list(xs), axis.size, axis.name))
        return heads.split([x.shape[2] // axis.size for x in xs], dim=2)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        axis = ctx.axis
        tokens = wait(torch.ops.megalith_copy_engine.tokens_from_heads(list(grads), axis.size, axis.name))
        if len(grads) == 1:
            return None, tokens
        query, key, _ = grads
        return None, *split_heads(tokens.flatten(2), query.shape[2] // key.shape[2], key.shape[3])


class _TokensFromHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return wait(torch.ops.megalith_copy_engine.tokens_from_heads([out], axis.size, axis.name))

    @staticmethod
    def backward(ctx, grad: Tensor):
        return wait(
            torch.ops.megalith_copy_engine.heads_from_tokens([grad], ctx.axis.size, ctx.axis.name)
        ), None
