"""Made-up samples, for a first run or a speed test without data files."""

from __future__ import annotations

import numpy as np


class MockDataset:
    """Deterministic samples, int64 [seq_length + 1]: sample i depends on (seed, i) and on the sizes only.

    A document counts upwards from a random token in steps of 1, 2 or 3, so a model can learn it, and ends with
    `eod` (nowhere else in it; None gives documents without an end). Its length is random, a third of a
    sample on average.
    """

    def __init__(
        self, vocab_size: int, seq_length: int, num_samples: int, seed: int, eod: int | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self.seq_length = seq_length
        self.num_samples = num_samples
        self.seed = seed
        self.eod = eod

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> np.ndarray:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a mock dataset that has {len(self)}")
        rng = np.random.default_rng([self.seed, i])
        sample = np.empty(self.seq_length + 1, dtype=np.int64)
        at = 0
        while at < len(sample):
            length = 2 + int(rng.integers(max(1, 2 * self.seq_length // 3)))
            sample[at : at + length] = self._document(rng, length)[: len(sample) - at]
            at += length
        return sample

    def epochs(self) -> dict[str, int]:
        return {}

    def describe(self, i: int) -> str:
        return f"sample {i} of the mock dataset"

    def in_order_of(self, num_samples: int, permuted: bool = False) -> bool:
        return not permuted or num_samples == len(self)

    def _document(self, rng: np.random.Generator, length: int) -> np.ndarray:
        words = self.vocab_size if self.eod is None else self.vocab_size - 1
        document = (rng.integers(words) + rng.integers(1, 4) * np.arange(length)) % words
        if self.eod is not None:
            document += document >= self.eod  # leaves the id of the end to the end
            document[-1] = self.eod
        return document
