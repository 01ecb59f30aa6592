"""Split of the fused QKV projection into query, key and value."""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.ops import kernels
from megalith.ops.gemm import add_bias_gradient


def split_qkv(
    qkv: Tensor, bias: Tensor | None, batch: int, heads_in_group: int, head_dim: int, flat: bool = True
) -> tuple[Tensor, ...]:
    """Return query [batch, seq, heads, head_dim], and key and value [batch, seq, groups, head_dim].

    All are views of qkv, except that queries of several groups with several heads are a copy. Without `flat` the
    queries are a view too, [batch, seq, groups, heads_in_group, head_dim].

    qkv is [..., groups · (heads_in_group + 2) · head_dim]. Each group has its queries, then its key, then its value.

    `bias`, float32 [rows of linear_qkv], is already included in qkv. It is passed only because its gradient is computed
    here.
    """
    qkv = qkv.view(batch, -1, qkv.shape[-1])
    if bias is not None and bias.requires_grad and kernels.fuses_backward(qkv):
        return _SplitQKV.apply(qkv, heads_in_group, head_dim, flat, bias)
    return split_heads(add_bias_gradient(qkv, bias), heads_in_group, head_dim, flat)


def split_heads(qkv: Tensor, heads_in_group: int, head_dim: int, flat: bool = True) -> tuple[Tensor, ...]:
    """Return query, key and value of qkv [batch, seq, ·] as `split_qkv` does, without a bias."""
    groups = qkv.unflatten(-1, (-1, heads_in_group + 2, head_dim))  # [batch, seq, groups, ·, head_dim]
    query, key, value = groups.split([heads_in_group, 1, 1], dim=3)
    return query.flatten(2, 3) if flat else query, key.squeeze(3), value.squeeze(3)


class _SplitQKV(torch.autograd.Function):
    """Splits qkv. One backward kernel assembles the gradient of qkv and sums it over tokens for the bias."""

    @staticmethod
    def forward(
        ctx, qkv: Tensor, heads_in_group: int, head_dim: int, flat: bool, bias: Tensor
    ) -> tuple[Tensor, ...]:
        return split_heads(qkv, heads_in_group, head_dim, flat)

    @staticmethod
    def backward(ctx, query: Tensor, key: Tensor, value: Tensor):
        query = query if query.ndim == 4 else query.flatten(2, 3)
        grad, grad_bias = torch.ops.megalith.join_qkv(query, key, value)
        return grad.unflatten(0, query.shape[:2]), None, None, None, grad_bias
