"""How context parallelism shards a sequence: into 2·size chunks, of which rank r has r and 2·size − 1 − r.

Causal attention gives late tokens more work than early ones. With an early and a late chunk each, all ranks have the
same (Brandon et al. 2023; Megatron-LM does the same). For size 2: rank 0 has chunks 0 and 3, rank 1 has 1 and 2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def spans(rank: int, size: int, seq: int) -> list[range]:
    """The places in the whole sequence of a rank's `seq` tokens: its two chunks."""
    chunk = seq // 2
    return [range(first * chunk, (first + 1) * chunk) for first in (rank, 2 * size - 1 - rank)]


def zigzag(x: Tensor, size: int, dim: int) -> Tensor:
    """Every rank's chunks, from the whole sequence along `dim`: [size, ..., seq, ...], `dim` without the new first."""
    early, late = x.unflatten(dim, (2, size, -1)).unbind(dim)  # [..., size, chunk, ...] each
    return torch.cat([early, late.flip(dim)], dim=dim + 1).movedim(dim, 0)


def natural(shards: Tensor, dim: int) -> Tensor:
    """The whole sequence along `dim`, from every rank's chunks [size, ..., seq, ...]: the inverse of zigzag."""
    early, late = shards.movedim(0, dim).chunk(2, dim=dim + 1)  # [..., size, chunk, ...] each
    return torch.cat([early, late.flip(dim)], dim=dim).flatten(dim, dim + 1)
