"""The one door from a parameter, as state, to the plain tensor that is computed with."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(parameter: Tensor) -> Tensor:
    """The shard of a DTensor that this process holds; a plain tensor is returned as it is."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
