"""Short causal convolution of each unit (channel), applied before linear attention and state space models."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad


def causal_conv(
    x: Tensor, taps: Tensor, documents: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Convolve each unit over the last tokens of the same document.

    Args:
        x: [batch, seq, units].
        taps: [units, 1, tokens]; the tap of the current token is last.
        documents: int [batch, seq], document number of each token; None means a single one.
        bias: [units], added to the result; None means no bias.

    Returns:
        [batch, seq, units] in x's dtype.
    """
    count = taps.shape[-1]
    taps, bias = taps.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if documents is None:
        return conv1d(pad(x.mT, (count - 1, 0)), taps, bias, groups=len(taps)).mT
    return by_shifts(x, taps, documents, bias)


def by_shifts(x: Tensor, taps: Tensor, documents: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Compute `causal_conv` in x's dtype by adding the products of x and each tap, the current token's first."""
    count = taps.shape[-1]
    total = torch.zeros_like(x)
    for back in range(count):
        moved = pad(x, (0, 0, back, 0))[:, : x.shape[1]]
        if documents is not None:
            same = pad(documents, (back, 0), value=-1)[:, : x.shape[1]] == documents
            moved = torch.where(same[..., None], moved, 0)
        total = total + moved * taps[:, 0, count - 1 - back]
    return total if bias is None else total + bias
