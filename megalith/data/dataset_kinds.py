"""Dataset kinds: the types of samples that models train on.

A kind is a file in `kinds/` with a subclass of `DatasetKind`, and a row in `DATASET_KINDS`.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod

from megalith.config.data import DataConfig
from megalith.config.model import ModelConfig
from megalith.data.blend import DatasetFactory
from megalith.data.dataset import SampleDataset
from megalith.data.loader import Collate
from megalith.data.tokenizers.tokenizer import Tokenizer

DATASET_KINDS: dict[str, str] = {  # model.model_type → module:class
    "gpt": "megalith.data.kinds.gpt_kind:GPTKind",
    "bert": "megalith.data.kinds.bert_kind:BertKind",
    "t5": "megalith.data.kinds.t5_kind:T5Kind",
}
OWN_KIND = "megalith.data.kinds.own_kind:OwnKind"  # if data.dataset is set


class DatasetKind(ABC):
    """Builds the datasets of a run, mock or from indexed datasets, and collates their samples."""

    collate: Collate | None = None
    """Makes a Batch from samples and their positions in the stream; None: samples are token ids."""

    def __init__(self, data: DataConfig, model: ModelConfig, tokenizer: Tokenizer | None, seed: int):
        """Check the settings. Raise ConfigError if they contradict each other."""
        self.data, self.model, self.tokenizer, self.seed = data, model, tokenizer, seed

    @abstractmethod
    def mock(self, num_samples: int, seed: int) -> SampleDataset:
        """Return a dataset of mock samples."""

    @abstractmethod
    def factory(self) -> DatasetFactory | None:
        """Return the dataset factory for `build_datasets`. None means GPTDataset."""

    def datasets(self, num_samples: tuple[int, int, int]) -> list[SampleDataset | None] | None:
        """Return the train, valid and test datasets. None means that `factory` builds them from data paths.

        Args:
            num_samples: numbers of samples that the run reads. A dataset is None if its number is 0.
        """
        return None

    def default_vocab_size(self) -> int:
        """Return the vocabulary size for a model that sets none. Needs a tokenizer."""
        return self.tokenizer.model_vocab_size


def load_dataset_kind(
    data: DataConfig, model: ModelConfig, tokenizer: Tokenizer | None, seed: int
) -> DatasetKind:
    """Return the dataset kind of the model's type, or of the user-defined dataset in data.dataset."""
    kind = DATASET_KINDS[model.model_type] if data.dataset is None else OWN_KIND
    module, _, name = kind.partition(":")
    return getattr(importlib.import_module(module), name)(data, model, tokenizer, seed)
