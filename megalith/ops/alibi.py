"""ALiBi (Press et al. 2022): attention with linear biases, instead of positions in the embedding or in the heads.

The score of a query with the key n places before it becomes score − slope · n, with a slope for each head: for 8 heads
1/2, 1/4, …, 1/256, in general 2^(−8·k/heads) for head k = 1, 2, …. Where the heads are no power of two, those beyond
one have the odd powers of twice as many heads', as in the paper's own code and in BLOOM.
"""

from __future__ import annotations

import torch
from torch import Tensor


def alibi_slopes(heads: int, first: int, count: int, device: torch.device) -> Tensor:
    """Those of `count` heads from number `first` on, of a layer with so many `heads`: float32 [count]."""
    numbers = torch.arange(first, first + count, dtype=torch.float32, device=device)
    power = 1 << heads.bit_length() - 1  # the largest in heads
    further = (numbers - power) * 2 + 1
    return torch.exp2(torch.where(numbers < power, (numbers + 1) * (-8 / power), further * (-4 / power)))


def alibi_bias(slopes: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """What is added to the scores, float32 [heads, queries, keys]; places in the sequence, int [queries] and [keys]."""
    return slopes[:, None, None] * (keys - queries[:, None])
