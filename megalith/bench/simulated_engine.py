"""An engine that samples random tokens and takes the time of a GPU, to measure the host's part of serving.

LiveEngine and RunningBatch run it like an Engine on a GPU: launches return at once, and reading a window waits until
the simulated GPU has computed everything that was launched before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.comm.collectives import Axis
from megalith.config import ModelConfig
from megalith.generation.logits_state import NO_PARTS, UsedParts
from megalith.generation.requests import RowSequence, Sampling

LAUNCHES = 30  # operators that a prefill pass launches per layer
REPLAY = 96  # size of a matmul that takes about as long as launching a CUDA graph


@dataclass(frozen=True)
class _Event:
    """The completion of the work that was launched before it."""

    time: float

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.time - time.perf_counter()))


class SimulatedEngine:
    """Stand-in for an Engine, with the attributes that LiveEngine and RunningBatch use."""

    slots = version = 0
    window = 8

    def __init__(
        self, config: ModelConfig, max_rows: int, max_tokens: int, step_seconds: float, prefill_seconds: float
    ):
        """Start idle.

        Args:
            config: architecture of the simulated model.
            max_rows: see Engine.
            max_tokens: see Engine.
            step_seconds: time of a decode step of all rows.
            prefill_seconds: time per token of a prompt.
        """
        self.config, self.max_rows, self.max_tokens = config, max_rows, max_tokens
        self.vocabulary_entries = config.vocab_size
        self.device, self.tp = torch.device("cuda"), Axis()
        self.prefill_tokens = self.reused_tokens = self.decode_steps = 0
        self.wait_seconds = 0.0
        self._step_seconds, self._prefill_seconds = step_seconds, prefill_seconds
        self._left = torch.zeros(max_rows, dtype=torch.int64)  # tokens until the limit
        self._operand = torch.zeros(REPLAY, REPLAY)
        self._generator = torch.Generator().manual_seed(0)
        self._end = 0.0  # of the launched work

    def reset_state(self, sampling: Sampling) -> None:
        """Make all rows idle."""
        self._left.zero_()

    def choose_rows(self, sequences: Sequence[RowSequence], free: Sequence[int]) -> list[int]:
        """Return the first free rows."""
        return list(free[: len(sequences)])

    def fill_rows(self, begun: Sequence[tuple[int, RowSequence]]) -> None:
        """Launch the prefill of sequences."""
        tokens = sum(len(sequence.prompt) for _, sequence in begun)
        for _ in range(LAUNCHES * self.config.num_layers):
            self._operand.sub_(1)
        self._launch(tokens * self._prefill_seconds)
        self.prefill_tokens += tokens
        for row, sequence in begun:
            sequence.pause_at, sequence.launched = sequence.limit, 0
            self._left[row] = sequence.limit

    def clear_row(self, row: int) -> None:
        """Make a row idle."""
        self._left[row] = 0

    def run_window(
        self,
        sampling: Sampling,
        rows: int,
        longest: int,
        steps: int | None = None,
        used: UsedParts = NO_PARTS,
    ) -> tuple[Tensor, Tensor, None, _Event]:
        """Launch a window of steps (see Engine.run_window)."""
        steps = self.window if steps is None else steps
        ids = torch.randint(self.config.vocab_size - 1, (steps, rows), generator=self._generator)
        ids.masked_fill_(torch.arange(steps)[:, None] >= self._left[:rows], -1)
        for _ in range(steps):
            torch.mm(self._operand, self._operand)
        self._left.sub_(steps).clamp_(min=0)
        self.decode_steps += steps
        return ids, torch.full((steps, rows), -1.0), None, self._launch(steps * self._step_seconds)

    def take_prefill_tokens(self) -> tuple[int, int]:
        """See Engine.take_prefill_tokens."""
        counts, self.prefill_tokens = (self.prefill_tokens, 0), 0
        return counts

    def take_draft_metrics(self) -> None:
        """Return None, as an Engine without speculation does."""

    def _launch(self, seconds: float) -> _Event:
        self._end = max(self._end, time.perf_counter()) + seconds
        return _Event(self._end)
