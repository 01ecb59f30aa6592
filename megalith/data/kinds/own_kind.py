"""Samples of a user-defined dataset (own_dataset.py)."""

from __future__ import annotations

from megalith.data.dataset import SPLITS, SampleDataset
from megalith.data.dataset_kinds import DatasetKind
from megalith.data.own_dataset import DatasetRequest, StreamDataset, open_own_dataset
from megalith.errors import ConfigError


class OwnKind(DatasetKind):
    """Kind for the datasets that the function in `data.dataset` returns."""

    def mock(self, num_samples: int, seed: int) -> SampleDataset:
        raise ConfigError("data.dataset and data.mock are both set; leave one of the two out")

    def factory(self) -> None:
        return None

    def datasets(self, num_samples: tuple[int, int, int]) -> list[SampleDataset | None]:
        opened: list[SampleDataset | None] = []
        for split, count in zip(SPLITS, num_samples):
            request = DatasetRequest(
                split,
                count,
                self.data.seq_length,
                self.model.vocab_size,
                self.seed,
                self.tokenizer,
                self.data,
            )
            opened.append(open_own_dataset(self.data.dataset, request) if count else None)
        streams = [id(split.dataset) for split in opened if isinstance(split, StreamDataset)]
        if len(set(streams)) < len(streams):
            raise ConfigError(
                f"data.dataset {self.data.dataset} returns the same stream for two splits, so "
                "both would advance it; return a new object for each"
            )
        if opened[0] is None and num_samples[0]:
            raise ConfigError(
                f"data.dataset {self.data.dataset} returns None for the split `train`; return a dataset"
            )
        return opened
