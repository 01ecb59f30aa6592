"""Heads of a KV group, or of a Mamba-2 group, that several tensor-parallel ranks share.

With more ranks than groups, each rank has some of a group's heads, and the group's keys and values (or B and C) are
computed on each of these ranks. The parameters are then replicated, and each rank uses the rows that the classes below
list.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from megalith.comm.collectives import Axis
from megalith.models.mixers.attention import CrossAttention, SelfAttention
from megalith.models.mixers.mamba2 import Mamba2
from megalith.models.mixers.recurrent import sum_squares
from megalith.parallel.tensor.tensor_parallel import TensorParallel


class SharedKVGroup:
    """Rows of linear_qkv (or linear_kv) that this rank uses if several ranks share a KV group.

    The rows are this rank's own query heads (in linear_qkv only), and the group's key and value.
    """

    def __init__(self, axis: Axis, attention: SelfAttention | CrossAttention, groups: int):
        ranks = axis.size // groups  # per group
        group, rank = divmod(axis.rank, ranks)
        size, heads = attention.head_dim, attention.heads.in_group
        if isinstance(attention, CrossAttention):
            self.spans = [(group * 2 * size, 2 * size)]  # first row, rows
            return
        first = group * (heads + 2) * size
        queries = (first + rank * (heads // ranks) * size, heads // ranks * size)
        self.spans = [queries, (first + heads * size, 2 * size)]

    def rows(self, parameter: Tensor) -> Tensor:
        """Return this rank's rows: [(local query heads + 2) · head_dim, ...] of linear_qkv, or [2 · head_dim, ...] of
        linear_kv.
        """
        return torch.cat([parameter.narrow(0, *span) for span in self.spans])


class SharedMambaGroup:
    """Rows of linear_zxbcdt and units of conv_xbc that this rank uses if several ranks share a group of Mamba-2.

    The rows are z, x and dt of this rank's own heads, and the group's B and C.
    """

    def __init__(self, axis: Axis, mixer: Mamba2, groups: int):
        self.axis, self.groups = axis, groups
        ranks = axis.size // groups  # per group
        self.group, rank = divmod(axis.rank, ranks)
        heads, states = mixer.heads_in_group, 2 * mixer.state_dim
        width = heads * mixer.head_dim
        here, dt = width // ranks, heads // ranks
        conv, linear = self.group * (width + states), self.group * (2 * width + states + heads)
        self._units = [(conv + rank * here, here), (conv + width, states)]
        self._rows = [
            (linear + rank * here, here),
            (linear + width + rank * here, here),
            (linear + 2 * width, states),
            (linear + 2 * width + states + rank * dt, dt),
        ]

    def rows(self, parameter: Tensor) -> Tensor:
        """Return the rows of linear_zxbcdt's weight or bias."""
        return torch.cat([parameter.narrow(0, *span) for span in self._rows])

    def units(self, parameter: Tensor) -> Tensor:
        """Return the units of conv_xbc's taps or bias."""
        return torch.cat([parameter.narrow(0, *span) for span in self._units])

    def total(self, tensor: TensorParallel, x: Tensor) -> Tensor:
        """Return the sum of squares [..., 1, 1] of x [..., 1, elements] over the ranks that share the Mamba-2 group."""
        squares = sum_squares(x)
        before, after = self.group, self.groups - self.group - 1
        return tensor.sum_over_ranks(F.pad(squares, (0, 0, before, after))).narrow(-2, before, 1)
