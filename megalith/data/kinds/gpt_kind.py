"""Samples of decoders: consecutive tokens of shuffled documents."""

from __future__ import annotations

from megalith.data.blend import DatasetFactory
from megalith.data.dataset import SampleDataset, split_ranges
from megalith.data.dataset_kinds import DatasetKind
from megalith.data.fill_in_middle import FillInMiddle, FimDataset
from megalith.data.indexed import IndexedDataset
from megalith.data.mock_datasets import MockDataset
from megalith.data.packed_dataset import PackedDataset
from megalith.progress import Progress


class GPTKind(DatasetKind):
    """Samples of a decoder: GPTDataset, FimDataset (fill in the middle) or PackedDataset. Mock data are MockDataset."""

    def mock(self, num_samples: int, seed: int) -> SampleDataset:
        eod = self.tokenizer and self.tokenizer.eod
        return MockDataset(self.model.vocab_size, self.data.seq_length, num_samples, seed, eod)

    def factory(self) -> DatasetFactory | None:
        if self.data.packing == "best_fit":
            return self._packed
        if not self.data.fim_data:
            return None
        fill_in_middle = FillInMiddle(self.data, self.tokenizer)

        def make(
            indexed: IndexedDataset, split: str, number: int, samples: int, progress: Progress
        ) -> FimDataset:
            documents = split_ranges(split, len(indexed))[number]
            return FimDataset(
                fill_in_middle, indexed, *documents, self.data.seq_length, samples, self.seed, progress
            )

        return make

    def _packed(
        self, indexed: IndexedDataset, split: str, number: int, samples: int, progress: Progress
    ) -> PackedDataset:
        documents = split_ranges(split, len(indexed))[number]
        return PackedDataset(indexed, *documents, self.data.seq_length, samples, self.seed, progress)
