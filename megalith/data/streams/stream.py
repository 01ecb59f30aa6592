"""Interface of datasets that are read in order and store their position in checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

STREAM_LENGTH = 1 << 62  # a stream's length for orders: positions are never mapped
State = dict[str, Any]  # JSON


class SampleStream(ABC):
    """A dataset whose items are read at ascending positions.

    Every data-parallel rank reads its own positions. Samples depend only on the position, not on the ranks.
    """

    @abstractmethod
    def restart(self, position: int = 0, stride: int = 1, kept_states: int = 1) -> None:
        """Prepare to read from `position`, continuing from the state that `load_state` set unless that state is after
        `position`.

        Args:
            position: the next sample to be read.
            stride: number of samples between positions whose states are needed. The first such position is `position`.
            kept_states: number of most recent states to keep.
        """

    @abstractmethod
    def state_at(self, position: int) -> State | None:
        """Return this rank's state before the sample at `position`, or None if it has no state."""

    def merged_state(self, position: int, states: Sequence[State | None]) -> State | None:
        """Merge the states of all data-parallel ranks before the sample at `position`.

        Returns None without a state.
        """
        return states[0]

    @abstractmethod
    def load_state(self, state: State | None) -> None:
        """Set the state, from `merged_state`, that the next `restart` continues from."""

    def restarted(self) -> Self:
        """Return the stream at its beginning, for an evaluation."""
        self.restart()
        return self

    def notes(self, state: State | None) -> list[str]:
        """Return notes on the data up to a merged state: the numbers of documents read and of documents left out."""
        return []

    def close(self) -> None:  # noqa: B027
        """Stop reading ahead. `restart` begins again."""
