"""Attention sinks (Xiao et al. 2023), as learned by gpt-oss.

A sink is a learned score per head that competes with the scores of the keys. It acts like a key whose value is 0, so it
merges like a block (attention_blocks.py) with l₂ = sink and o₂ = 0, and the kernels' backward takes the merged o and l.
The gradient of the sink is the sum of −exp(sink − l) · o · grad.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.ops.block_attention import block_attention, block_attention_backward


def merge_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the output o [batch, heads, queries, head_dim] and the log-sum-exp l of attention with sinks, float32
    [heads] or [heads, queries]."""
    sink = sink[:, None] if sink.dim() == 1 else sink
    return out * torch.sigmoid(lse - sink)[..., None].to(out.dtype), torch.logaddexp(lse, sink)


def sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Return the gradient of the sink, float32 [heads]. `out` and `lse` are results of `merge_sink`, `grad` is the
    gradient of `out`.
    """
    share = (sink[:, None] - lse).exp()  # [batch, heads, queries]
    return -(share * (grad.float() * out.float()).sum(-1)).sum((0, 2))


class SinkAttention(torch.autograd.Function):
    """block_attention with a sink, float32 [heads]. Returns only o."""

    @staticmethod
    def forward(ctx, sink: Tensor, query: Tensor, key: Tensor, value: Tensor, *settings) -> Tensor:
        out, lse = merge_sink(*block_attention(query, key, value, *settings), sink)
        mask, documents, *ctx.plain = settings
        ctx.save_for_backward(sink, query, key, value, out, lse, mask, documents)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        sink, *saved = ctx.saved_tensors
        grad_sink = sink_gradient(grad, saved[3], saved[4], sink)
        return grad_sink, *block_attention_backward(grad, *saved, *ctx.plain), *[None] * 5
