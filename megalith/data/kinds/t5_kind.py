"""Samples of encoder-decoders: the decoder restores masked spans of words."""

from __future__ import annotations

from megalith.config.data import DataConfig
from megalith.config.model import ModelConfig
from megalith.data.blend import DatasetFactory
from megalith.data.dataset import SampleDataset, split_ranges
from megalith.data.dataset_kinds import DatasetKind
from megalith.data.indexed import IndexedDataset
from megalith.data.kinds.bert_kind import masking_settings, require_tokenizer
from megalith.data.mock_datasets import MockPairDataset
from megalith.data.pairs import SPANS, SpanDataset, SpanTokens, make_t5_batch
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError
from megalith.progress import Progress


class T5Kind(DatasetKind):
    """Samples of an encoder-decoder with masked spans (SpanDataset). Mock data are MockPairDataset."""

    collate = staticmethod(make_t5_batch)

    def __init__(self, data: DataConfig, model: ModelConfig, tokenizer: Tokenizer | None, seed: int):
        super().__init__(data, model, tokenizer, seed)
        self.masking = masking_settings(data, model, **SPANS)
        self.lengths = data.seq_length, data.decoder_length

    def mock(self, num_samples: int, seed: int) -> SampleDataset:
        return MockPairDataset(self.model.vocab_size, *self.lengths, num_samples, seed)

    def factory(self) -> DatasetFactory:
        tokens = self._span_tokens(require_tokenizer(self))

        def make(
            indexed: IndexedDataset, split: str, number: int, samples: int, progress: Progress
        ) -> SpanDataset:
            documents = split_ranges(split, indexed.num_documents)[number]
            arguments = self.lengths, samples, self.seed, tokens, self.masking
            return SpanDataset(indexed, *documents, *arguments, progress=progress)

        return make

    def default_vocab_size(self) -> int:
        return self._span_tokens(self.tokenizer).words.vocab_size

    def _span_tokens(self, tokenizer: Tokenizer) -> SpanTokens:
        tokens, size = SpanTokens.from_tokenizer(tokenizer, self.data.vocab_extra_ids), self.model.vocab_size
        if size is not None and size < tokens.words.vocab_size:
            raise ConfigError(
                f"the tokenizer has {tokens.words.vocab_size} entries with {len(tokens.sentinels)} sentinels "
                f"(data.vocab_extra_ids), but model.vocab_size is {size}; raise model.vocab_size, or lower "
                "data.vocab_extra_ids"
            )
        return tokens
