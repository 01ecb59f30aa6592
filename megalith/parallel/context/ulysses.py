"""Ulysses, the a2a of context parallelism (Jacobs et al. 2023): the all-to-all of heads for tokens, and back.

By NCCL or gloo the shares are packed, sent and unpacked. By copy engines (copy_engine.py) they are fetched to
their final addresses, so that nothing is packed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalith.comm.collectives import Axis, all_to_all, wait
from megalith.ops.attention_core import split_heads
from megalith.parallel.context.zigzag import natural, zigzag


def heads_from_tokens(query: Tensor, key: Tensor, value: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Some tokens of all heads → all tokens of this rank's share of the heads, in order; one exchange for the three.

    From [batch, seq, heads, head_dim] to [batch, size · seq, heads / size, head_dim]. Key and value heads, where size
    does not divide them, are first repeated to the least number that it does; the gradient of a repeated head is the
    sum over its copies.
    """
    if axis.size == 1:
        return query, key, value
    groups = key.shape[2]
    copies = math.lcm(groups, axis.size) // groups
    if copies > 1:
        key, value = key.repeat_interleave(copies, dim=2), value.repeat_interleave(copies, dim=2)
    if axis.by_copy_engine(query):
        return _HeadsFromTokens.apply(query, key, value, axis)
    shares = [x.unflatten(2, (axis.size, -1)) for x in (query, key, value)]  # [batch, seq, size, ·, head_dim]
    widths = [share.shape[3] for share in shares]
    return _exchanged(torch.cat(shares, dim=3), axis).split(widths, dim=2)


def tokens_from_heads(out: Tensor, axis: Axis) -> Tensor:
    """The way back: [batch, size · seq, heads / size, head_dim] → [batch, seq, heads, head_dim]."""
    if axis.size == 1:
        return out
    if axis.by_copy_engine(out):
        return _TokensFromHeads.apply(out, axis)
    return all_to_all(zigzag(out, axis.size, dim=1), axis).movedim(0, 2).flatten(2, 3)


def _exchanged(shares: Tensor, axis: Axis) -> Tensor:
    """[batch, seq, size, ·, head_dim] → [batch, size · seq, ·, head_dim]"""
    return natural(all_to_all(shares.movedim(2, 0), axis), dim=1)


class _HeadsFromTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, axis: Axis) -> tuple[Tensor, ...]:
        ctx.axis, xs = axis, [query, key, value]
        heads = wait(torch.ops.megalith_direct.heads_from_tokens(xs, axis.size, axis.name))
        return heads.split([x.shape[2] // axis.size for x in xs], dim=2)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        axis, (query, key, _) = ctx.axis, grads
        tokens = wait(torch.ops.megalith_direct.tokens_from_heads(list(grads), axis.size, axis.name))
        return *split_heads(tokens.flatten(2), query.shape[2] // key.shape[2], key.shape[3]), None


class _TokensFromHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return wait(torch.ops.megalith_direct.tokens_from_heads([out], axis.size, axis.name))

    @staticmethod
    def backward(ctx, grad: Tensor):
        return wait(torch.ops.megalith_direct.heads_from_tokens([grad], ctx.axis.size, ctx.axis.name)), None
