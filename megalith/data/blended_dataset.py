"""Samples from several datasets by weight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megalith.data.dataset import SampleDataset
from megalith.data.greedy import BLOCK, scheduled_order
from megalith.data.mixture import BlendWeights, Mixture
from megalith.errors import ConfigError
from megalith.tables import counted


class BlendedDataset:
    """`num_samples` samples from several datasets by weight (any positive numbers, or a Mixture).

    The order takes one byte of memory per sample, or two with more than 256 datasets.
    """

    def __init__(
        self, datasets: Sequence[SampleDataset], weights: Sequence[float] | Mixture, num_samples: int
    ) -> None:
        if not isinstance(weights, Mixture):
            weights = Mixture(BlendWeights.constant(weights))
        self.datasets, self.mixture = list(datasets), weights
        self.weights = weights.weights(num_samples)
        self._choices, self._counts = scheduled_order(self.weights, num_samples)

    def __len__(self) -> int:
        return len(self._choices)

    @property
    def pads(self) -> bool:
        """True if samples may end with PADDING."""
        return any(getattr(dataset, "pads", False) for dataset in self.datasets)

    def __getitem__(self, i: int) -> np.ndarray:
        dataset, sample = self.locate(i)
        return self.datasets[dataset][sample]

    def sample_counts(self, first: int = 0, end: int | None = None) -> list[int]:
        """Return the number of samples from each dataset among samples [first, end)."""
        return np.bincount(self._choices[first:end], minlength=len(self.datasets)).tolist()

    def locate(self, i: int) -> tuple[int, int]:
        """Return the index of the dataset that contains sample i, and the sample's index in it."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} is out of range of a blend of {counted(len(self), 'sample')}")
        return self._locate(i)

    def _locate(self, i: int) -> tuple[int, int]:
        dataset, block = int(self._choices[i]), i // BLOCK
        in_block = np.count_nonzero(self._choices[block * BLOCK : i] == dataset)
        return dataset, int(self._counts[block, dataset]) + in_block

    def attention_cost(self, indices: Sequence[int]) -> np.ndarray:
        """Return the sum of squared document lengths of each sample, float64 [indices]."""
        located = map(self.locate, indices)
        return np.array([self.datasets[k].attention_cost([i])[0] for k, i in located], dtype=np.float64)

    def describe(self, i: int) -> str:
        dataset, sample = self.locate(i)
        return self.datasets[dataset].describe(sample)

    def epochs(self) -> dict[str, int]:
        return {prefix: count for dataset in self.datasets for prefix, count in dataset.epochs().items()}

    def preserves_order(self, num_samples: int, permuted: bool = False) -> bool:
        if permuted and num_samples != len(self):
            return False
        try:
            if not self.mixture.weights(num_samples).equals(self.weights):
                return False
        except ConfigError:  # a longer run than the caps permit
            return False
        shares = self.mixture.sizes(num_samples)
        return all(dataset.preserves_order(share) for dataset, share in zip(self.datasets, shares))
