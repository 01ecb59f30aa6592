"""Batch-invariant attention over sharded sequences, for rl.exact and train.batch_invariant.

Each query sums over its keys in the same order as on one device (ops/batch_invariant/invariant_attention.py):

    a2a         a rank has all tokens of some heads
    all_gather  a rank's queries see all keys and values, in order; ring.py computes the backward pass

In a ring, the order would depend on the query's rank, so the configuration's rules reject it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from megalith.comm.collectives import Axis, all_gather_no_grad
from megalith.ops.batch_invariant import recurrences
from megalith.ops.batch_invariant.invariant_attention import MULTIPLE, attend, attention, first_keys
from megalith.parallel.context.full_sequences import ShardedOrFull
from megalith.parallel.context.recurrent_states import context_convolution
from megalith.parallel.context.ring import ring_attention_backward
from megalith.parallel.context.ulysses import heads_from_tokens, tokens_from_heads
from megalith.parallel.context.zigzag import from_zigzag, spans


def invariant_core(axis: Axis, cp_comm_type: str) -> Callable[..., Tensor]:
    """Return the core of attention for sequences that are sharded over `axis`."""
    if axis.size == 1:
        return attention
    sharded = partial(_by_heads if cp_comm_type == "a2a" else _by_queries, axis=axis)
    return ShardedOrFull(sharded, attention)


def _by_heads(query: Tensor, key: Tensor, value: Tensor, *, axis: Axis, **settings) -> Tensor:
    """Return attention [batch, seq, heads, head_dim] of this rank's tokens, with an all-to-all of tokens for heads."""
    return tokens_from_heads(attention(*heads_from_tokens(query, key, value, axis), **settings), axis)


def _by_queries(
    query: Tensor,  # [batch, seq, heads, head_dim]: this rank's shard of the sequence
    key: Tensor,  # [batch, seq, groups, head_dim]
    value: Tensor,  # [batch, seq, groups, head_dim]
    *,
    axis: Axis,
    mask: Tensor | None = None,
    documents: Tensor | None = None,  # int32 [batch, documents]: ends in the full sequence
    window: int | None = None,
    scale: float | None = None,
    **_unsupported,
) -> Tensor:
    """Return attention [batch, seq, heads, head_dim] of this rank's tokens, with all-gathered keys and values."""
    assert mask is None, "all_gather supports documents, but no mask"
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _Gathered.apply(query, key, value, documents, window, scale, axis)


def invariant_convolution(
    axis: Axis, x: Tensor, taps: Tensor, documents: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Compute batch_invariant.recurrences.convolution of this rank's two chunks. Returns [batch, seq, units]."""
    return context_convolution(axis, x, taps, documents, bias, recurrences.convolution)


@torch.no_grad()
def invariant_recurrence(axis: Axis, recurrence: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    """Return a recurrence's outputs [batch, seq, ...] for this rank's tokens, computed over full sequences.

    Args:
        axis: the context axis.
        recurrence: function called with the gathered `inputs`, the last of which numbers the documents.
        inputs: tensors [batch, seq, ...] of this rank's tokens, or one number per head [heads], or None.
    """
    seq = inputs[0].shape[1]
    gathered = [
        x if x is None or x.dim() == 1 else from_zigzag(all_gather_no_grad(x[None].contiguous(), axis), 1)
        for x in inputs
    ]
    out = recurrence(*gathered)
    return torch.cat([out[:, span.start : span.stop] for span in spans(axis.rank, axis.size, seq)], 1)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Tensor | None,
        window: int | None,
        scale: float,
        axis: Axis,
    ) -> Tensor:
        batch, seq = query.shape[:2]
        shards = all_gather_no_grad(torch.stack([key, value])[None], axis)
        keys, values = from_zigzag(shards, dim=2)  # [batch, size · seq, groups, head_dim]
        index = torch.cat([torch.arange(s.start, s.stop) for s in spans(axis.rank, axis.size, seq)])
        index = index.to(query.device)
        starts = first_keys(seq * axis.size, None, documents)
        starts = None if starts is None else starts[:, index]
        seen = None if window is None or window >= keys.shape[1] else window
        out, lse = attend(query, keys, values, index.expand(batch, -1), starts, seen, scale)
        ctx.save_for_backward(query, key, value, out, lse, documents)
        ctx.plain = (window, None, scale, None, 0.0, 0, axis.size, axis.rank, axis.name, True, True)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        *tensors, lse, documents = ctx.saved_tensors
        size = grad.shape[3]
        filling = -size % MULTIPLE if grad.is_cuda else 0  # zeros change nothing
        tensors = [pad(x, (0, filling)) for x in (grad, *tensors)]
        states = torch.zeros(
            4, 2, dtype=torch.int64, device=grad.device
        )  # of dropout, which there is none of
        gradients = ring_attention_backward(*tensors, lse.contiguous(), states, documents, None, *ctx.plain)
        return *(x[..., :size] for x in gradients), *[None] * 4
