"""Queries, keys and values out of the one matmul that gives all three."""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.ops import kernels
from megalith.ops.gemm import add_bias_gradient


def split_qkv(
    qkv: Tensor, bias: Tensor | None, batch: int, heads_in_group: int, head_dim: int
) -> tuple[Tensor, ...]:
    """Query [batch, seq, heads, head_dim], key and value [batch, seq, groups, head_dim] as views of qkv [..., groups ·
    (heads_in_group + 2) · head_dim], in which each group has its queries, its key and its value.

    `bias` float32 [rows of linear_qkv], which qkv has had added without its gradient, gets its gradient here.
    """
    qkv = qkv.view(batch, -1, qkv.shape[-1])
    if bias is not None and bias.requires_grad and kernels.on_gpu(qkv):
        return _SplitQKV.apply(qkv, heads_in_group, head_dim, bias)
    return split_heads(add_bias_gradient(qkv, bias), heads_in_group, head_dim)


def split_heads(qkv: Tensor, heads_in_group: int, head_dim: int) -> tuple[Tensor, ...]:
    """As split_qkv, of qkv [batch, seq, ·] without a bias."""
    groups = qkv.unflatten(-1, (-1, heads_in_group + 2, head_dim))  # [batch, seq, groups, ·, head_dim]
    return tuple(part.flatten(2, 3) for part in groups.split([heads_in_group, 1, 1], dim=3))


class _SplitQKV(torch.autograd.Function):
    """One kernel puts the gradient of qkv together and sums it over the tokens for the bias."""

    @staticmethod
    def forward(ctx, qkv: Tensor, heads_in_group: int, head_dim: int, bias: Tensor) -> tuple[Tensor, ...]:
        return split_heads(qkv, heads_in_group, head_dim)

    @staticmethod
    def backward(ctx, query: Tensor, key: Tensor, value: Tensor):
        grad, grad_bias = torch.ops.megalith.join_qkv(query, key, value)
        return grad.unflatten(0, query.shape[:2]), None, None, grad_bias
