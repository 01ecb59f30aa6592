"""A blend with at least one stream. Samples are drawn in the order of the blend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megalith.data.blended_dataset import BlendedDataset
from megalith.data.dataset import SampleDataset
from megalith.data.mixture import Mixture
from megalith.data.streams.stream import STREAM_LENGTH, SampleStream, State


class BlendedStream(BlendedDataset, SampleStream):
    """`num_samples` samples from several datasets, some of them streams. Later positions repeat the same order of
    datasets.

    Indexed datasets are read in their own order and start again after their last sample.
    """

    def __init__(self, datasets: Sequence[SampleDataset], weights: Mixture, num_samples: int) -> None:
        super().__init__(datasets, weights, num_samples)
        self._num_samples = num_samples
        self._totals = np.array(self.sample_counts(), dtype=np.int64)

    def __len__(self) -> int:
        return STREAM_LENGTH

    def locate(self, i: int) -> tuple[int, int]:
        """See BlendedDataset."""
        rounds, at = divmod(i, self._num_samples)
        dataset, sample = self._locate(at)
        return dataset, (rounds * int(self._totals[dataset]) + sample) % len(self.datasets[dataset])

    def preserves_order(self, num_samples: int, permuted: bool = False) -> bool:
        """See BlendedDataset. A stream is not permuted."""
        return super().preserves_order(num_samples)

    def restart(self, position: int = 0, stride: int = 1, kept_states: int = 1) -> None:
        """See SampleStream."""
        for part, count in self._parts(position):
            if isinstance(part, SampleStream):
                part.restart(count, 1, stride * kept_states)

    def state_at(self, position: int) -> State | None:
        """See SampleStream."""
        return {
            "parts": [
                part.state_at(count) if isinstance(part, SampleStream) else None
                for part, count in self._parts(position)
            ]
        }

    def merged_state(self, position: int, states: Sequence[State | None]) -> State | None:
        """See SampleStream."""
        parts = zip(*(state["parts"] for state in states))
        return {
            "parts": [
                part.merged_state(count, each) if isinstance(part, SampleStream) else None
                for (part, count), each in zip(self._parts(position), parts)
            ]
        }

    def load_state(self, state: State | None) -> None:
        """See SampleStream."""
        saved = [None] * len(self.datasets) if state is None else state["parts"]
        for part, each in zip(self.datasets, saved, strict=True):
            if isinstance(part, SampleStream):
                part.load_state(each)

    def notes(self, state: State | None) -> list[str]:
        """See SampleStream."""
        parts = zip(self.datasets, state["parts"], strict=True)
        return [note for part, each in parts if isinstance(part, SampleStream) for note in part.notes(each)]

    def close(self) -> None:
        """See SampleStream."""
        for part in self.datasets:
            if isinstance(part, SampleStream):
                part.close()

    def _parts(self, position: int) -> list[tuple[SampleDataset, int]]:
        """Return each source and the number of its samples before a position."""
        rounds, at = divmod(position, self._num_samples)
        counts = rounds * self._totals + np.array(self.sample_counts(0, at))
        return list(zip(self.datasets, counts.tolist()))
