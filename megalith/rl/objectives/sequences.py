"""Sums and means over the sequences in packed or padded rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class SequenceBatch(Protocol):
    """A micro-batch whose tokens belong to numbered sequences."""

    loss_mask: Tensor
    sequence_ids: Tensor
    sequence_tokens: Tensor


@dataclass(frozen=True)
class Sequences:
    """The tokens of [batch, seq] that are in the loss, and their sequences."""

    mask: Tensor  # bool [batch, seq]
    sequence_ids: Tensor  # int64 [batch, seq]
    tokens: Tensor  # float [sequences], tokens in the loss; at least one entry

    @classmethod
    def from_batch(cls, batch: SequenceBatch) -> Sequences:
        """Return the sequences of a micro-batch. A batch without sequences gets one sequence without tokens."""
        tokens = batch.sequence_tokens
        return cls(batch.loss_mask > 0, batch.sequence_ids, tokens if len(tokens) else tokens.new_zeros(1))

    def masked(self, x: Tensor | None) -> Tensor | None:
        """Return x with 0 at prompt and padding tokens, even where x is NaN. None stays None."""
        return None if x is None else torch.where(self.mask, x, 0.0)

    def sums(self, x: Tensor) -> Tensor:
        """Return the sum over the loss tokens of each sequence: [batch, seq] → [sequences]."""
        flat = self.masked(x).flatten()
        return flat.new_zeros(len(self.tokens)).index_add(0, self.sequence_ids.flatten(), flat)

    def maxima(self, x: Tensor) -> Tensor:
        """Return the maximum over the loss tokens of each sequence: [batch, seq] → [sequences]. Elements of x must be
        at least 0.
        """
        flat = self.masked(x).flatten()
        return flat.new_zeros(len(self.tokens)).scatter_reduce(0, self.sequence_ids.flatten(), flat, "amax")

    def per_token(self, x: Tensor) -> Tensor:
        """Expand [sequences] → [batch, seq]: each token gets the value of its sequence."""
        return x[self.sequence_ids]

    def means(self, x: Tensor) -> Tensor:
        """Return the mean over the loss tokens of each sequence: [batch, seq] → [sequences], or 0 if it has none."""
        return self.sums(x) / self.tokens.clamp(min=1)
