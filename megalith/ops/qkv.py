"""Queries, keys and values out of the one matmul that gives all three."""

from __future__ import annotations

import torch
from torch import Tensor


def split_qkv(
    qkv: Tensor, heads_in_group: int, head_dim: int, bias: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Query [batch, seq, heads, head_dim], key and value [batch, seq, groups, head_dim] as views of qkv [batch, seq,
    groups · (heads_in_group + 2) · head_dim], in which each group has its queries, its key and its value.

    With `bias` float32 [rows of linear_qkv], which qkv has had added without its gradient, the gradient of qkv is put
    together by one kernel, which sums it over the tokens for the bias.
    """
    if bias is None:
        return _split(qkv, heads_in_group, head_dim)
    return _SplitQKV.apply(qkv, heads_in_group, head_dim, bias)


def _split(qkv: Tensor, heads_in_group: int, head_dim: int) -> tuple[Tensor, ...]:
    groups = qkv.unflatten(-1, (-1, heads_in_group + 2, head_dim))  # [batch, seq, groups, ·, head_dim]
    return tuple(part.flatten(2, 3) for part in groups.split([heads_in_group, 1, 1], dim=3))


class _SplitQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv: Tensor, heads_in_group: int, head_dim: int, bias: Tensor) -> tuple[Tensor, ...]:
        return _split(qkv, heads_in_group, head_dim)

    @staticmethod
    def backward(ctx, query: Tensor, key: Tensor, value: Tensor):
        grad, grad_bias = torch.ops.megalith.join_qkv(query, key, value)
        return grad.unflatten(0, query.shape[:2]), None, None, grad_bias
