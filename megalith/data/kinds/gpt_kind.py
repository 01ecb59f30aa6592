"""Samples of decoders: consecutive tokens of shuffled documents."""

from __future__ import annotations

from megalith.data.dataset import SampleDataset
from megalith.data.dataset_kinds import DatasetKind
from megalith.data.mock_datasets import MockDataset


class GPTKind(DatasetKind):
    """GPTDataset, or MockDataset."""

    def mock(self, num_samples: int, seed: int) -> SampleDataset:
        eod = self.tokenizer and self.tokenizer.eod
        return MockDataset(self.model.vocab_size, self.data.seq_length, num_samples, seed, eod)

    def factory(self) -> None:
        return None
