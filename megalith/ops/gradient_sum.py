"""The sum in fp32 of what several ranks have sent in a short type, in one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.ops import kernels


def sum_of_parts(parts: Tensor, out: Tensor) -> None:
    """Writes to out float32 [size] the sum of parts [ranks, size], in their order."""
    if kernels.AVAILABLE and parts.is_cuda:
        kernels.sum_parts(parts, out)
        return
    torch.sum(parts, 0, dtype=torch.float32, out=out)
