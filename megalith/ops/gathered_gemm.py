"""Matmuls with a separate matrix per sequence or row, gathered from a stack, for several adapters in one batch."""

from __future__ import annotations

import torch
from torch import Tensor


def gathered_linear(x: Tensor, weights: Tensor, *indices: Tensor) -> Tensor:
    """Multiply x [batch, tokens, in] by the transpose of each sequence's matrix. Returns [batch, tokens, out].

    Args:
        x: the sequences. Rows [batch, in] are sequences of one token.
        weights: the matrices, [n, out, in], or with more dimensions before these.
        indices: index of each sequence's matrix, int64 [batch] per dimension before [out, in].
    """
    if x.ndim == 2:
        return gathered_linear(x[:, None], weights, *indices)[:, 0]
    return torch.bmm(x, weights[indices].mT)
