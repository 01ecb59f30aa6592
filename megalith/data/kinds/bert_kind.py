"""Samples of encoders: two segments of sentences with masked words."""

from __future__ import annotations

from megalith.config.data import DataConfig
from megalith.config.model import ModelConfig
from megalith.data.blend import DatasetFactory
from megalith.data.dataset import SampleDataset, split_ranges
from megalith.data.dataset_kinds import DatasetKind
from megalith.data.indexed import IndexedDataset
from megalith.data.masked_lm import MaskedLMDataset, Masking, WordPieces, make_bert_batch
from megalith.data.mock_datasets import MockMaskedDataset
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError
from megalith.progress import Progress


class BertKind(DatasetKind):
    """Masked samples of an encoder (MaskedLMDataset). Mock data are MockMaskedDataset."""

    collate = staticmethod(make_bert_batch)

    def __init__(self, data: DataConfig, model: ModelConfig, tokenizer: Tokenizer | None, seed: int):
        super().__init__(data, model, tokenizer, seed)
        self.masking = masking_settings(data, model)

    def mock(self, num_samples: int, seed: int) -> SampleDataset:
        size = self.model.vocab_size, self.data.seq_length
        return MockMaskedDataset(*size, num_samples, seed, self.masking)

    def factory(self) -> DatasetFactory:
        words = WordPieces.from_tokenizer(require_tokenizer(self), self.model.vocab_size)

        def make(
            indexed: IndexedDataset, split: str, number: int, samples: int, progress: Progress
        ) -> MaskedLMDataset:
            documents = split_ranges(split, indexed.num_documents)[number]
            arguments = self.data.seq_length, samples, self.seed, words, self.masking
            return MaskedLMDataset(indexed, *documents, *arguments, progress=progress)

        return make


def masking_settings(data: DataConfig, model: ModelConfig, **defaults: object) -> Masking:
    """Return the settings of Masking.

    Values in `data` take precedence over `defaults`, and those over Masking's own defaults.
    """
    if model.bert_binary_head and model.tokentypes == 1:
        raise ConfigError(
            "model.num_tokentypes is 1, but with model.bert_binary_head a sample has two segments; set "
            "model.num_tokentypes to 2 or more, or to 0"
        )
    names = [name for name in Masking._fields if name != "classification_head"]
    settings = {name: getattr(data, name) for name in names if getattr(data, name) is not None}
    return Masking(**{**defaults, **settings}, classification_head=model.bert_binary_head)


def require_tokenizer(kind: DatasetKind) -> Tokenizer:
    """Return the kind's tokenizer. Raise ConfigError if there is none, because masking needs one."""
    if kind.tokenizer is None:
        raise ConfigError(
            f"model.model_type {kind.model.model_type} masks words, which needs a tokenizer, but data.tokenizer_type "
            "is not set; set it to the tokenizer that data.data_path was preprocessed with"
        )
    return kind.tokenizer
