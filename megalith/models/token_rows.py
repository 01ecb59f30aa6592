"""Rows of an embedding or output matrix that are trained with adapters: PEFT's `trainable_token_indices`.

The rows of some tokens are separate parameters. They replace the rows of the frozen matrix wherever it is used.
They are initialized with the matrix's values. A tied embedding and output matrix have the same trained rows. Under
tensor parallelism every rank holds all trained rows and uses the rows in its shard of the vocabulary, so each rank's
gradient of the trained rows is partial.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megalith.local_shards import local, local_shape_and_offset
from megalith.models.adapter import Adapter


class TokenRows(Adapter):
    """Trained rows of one matrix [vocabulary, hidden]. With a `scaling` of 0, the original rows are used."""

    def __init__(self, tokens: Sequence[int], hidden: int):
        """Create the rows for these tokens on the meta device."""
        nn.Module.__init__(self)
        self.scaling, self.ranks, self.factors = 1.0, {}, {}
        self.tokens = tuple(tokens)
        self.weight = nn.Parameter(torch.empty(len(self.tokens), hidden, device="meta"))
        self._cached: tuple[tuple[int, int, torch.device], tuple[Tensor, Tensor]] | None = None

    def matrix(self, parameter: Tensor) -> Tensor:
        """Return this rank's shard of the matrix with the trained rows inserted. `parameter` is the original shard."""
        if self.scaling == 0:
            return local(parameter)
        _, (first, _) = local_shape_and_offset(getattr(parameter, "dtensor", parameter))
        return self.put_into(local(parameter), first)

    def put_into(self, rows: Tensor, first: int) -> Tensor:
        """Return a copy of `rows`, the matrix rows from row `first` on, with the trained rows inserted."""
        index, number = self._find(first, len(rows), rows.device)
        return rows.index_copy(0, index, local(self.weight)[number].to(rows.dtype))

    def merged(self, weight: Tensor) -> Tensor:
        return self.put_into(weight.float(), 0)

    def _find(self, first: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Find the trained tokens among tokens `first` to `first + count - 1`.

        Return their indices relative to `first` and their rows in `weight`, both int64.
        """
        key = first, count, device
        if self._cached is None or self._cached[0] != key:
            tokens = torch.tensor(self.tokens) - first
            number = ((tokens >= 0) & (tokens < count)).nonzero()[:, 0]
            self._cached = key, (tokens[number].to(device), number.to(device))
        return self._cached[1]
