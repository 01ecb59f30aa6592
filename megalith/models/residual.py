"""Addition of a branch's output to the residual stream."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megalith.models.norm import Norm, norm_or_identity
from megalith.ops.dropout import Mask
from megalith.ops.fused_norm import residual_add


def branch_output(y: Tensor, norm: Norm | None, multiplier: float) -> Tensor:
    """Return a branch's output y [batch, seq, hidden] after its norm and the residual multiplier."""
    y = norm_or_identity(norm, y)
    return y if multiplier == 1 else y * multiplier


class Residual(NamedTuple):
    """A residual stream that waits for a branch's output."""

    stream: Tensor  # [batch, seq, hidden]
    norm: Norm | None  # of the branch's output
    multiplier: float
    dropout: Mask | None

    def add(self, y: Tensor) -> Tensor:
        """Return the stream plus y [batch, seq, hidden]."""
        return residual_add(self.stream, branch_output(y, self.norm, self.multiplier), self.dropout)
