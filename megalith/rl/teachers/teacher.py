"""The interface of teachers, and their predictions for a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from megalith.data.batch import Batch


class Prediction(NamedTuple):
    """A teacher's predictions for a micro-batch. Fields are None on all pipeline stages but the last."""

    teacher_hidden: Tensor | None = None
    """Input of the teacher's output matrix, float [..., hidden]. None: the predictions are its top entries."""
    indices: Tensor | None = None
    """Most likely entries, int [batch, seq, k]."""
    logprobs: Tensor | None = None
    """Log-probabilities of these entries, and of all other entries together, float32 [batch, seq, k + 1]."""


class Teacher(Protocol):
    """Interface of teachers, which predict the tokens of micro-batches."""

    note: str
    """Description for the log."""

    def predict(self, batches: Sequence[Batch]) -> list[Prediction]:
        """Return the predictions for the micro-batches of a step. Collective over all ranks."""
