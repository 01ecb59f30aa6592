"""Mock datasets, for a first run or a speed test without data files.

Samples depend only on (seed, i) and on the sizes. Their tokens count upwards, which a model can learn.
"""

from __future__ import annotations

import numpy as np

from megalith.config.data import SPECIAL_COUNT
from megalith.data.masked_lm import SPECIAL, Masking, WordPieces, make_sample
from megalith.data.pairs import DECODER_START, pair_dtype
from megalith.errors import ConfigError
from megalith.tables import counted


class _MockSamples:
    """Base of the mock datasets. A subclass makes sample i in `_sample`."""

    num_samples: int
    seed: int

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> np.ndarray:
        if not 0 <= i < len(self):
            raise IndexError(
                f"sample {i} is out of range of a mock dataset of {counted(len(self), 'sample')}"
            )
        return self._sample(i)

    def epochs(self) -> dict[str, int]:
        return {}

    def describe(self, i: int) -> str:
        return f"sample {i} of the mock dataset"

    def preserves_order(self, num_samples: int, permuted: bool = False) -> bool:
        return not permuted or num_samples == len(self)

    def _sample(self, i: int) -> np.ndarray:
        raise NotImplementedError


class MockDataset(_MockSamples):
    """Mock samples for a decoder, int64 [seq_length + 1].

    A document counts up from a random token in steps of 1, 2 or 3, and ends with `eod` (which occurs nowhere else;
    None means no end token). Document lengths are random, a third of a sample on average.
    """

    def __init__(
        self, vocab_size: int, seq_length: int, num_samples: int, seed: int, eod: int | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self.seq_length = seq_length
        self.num_samples = num_samples
        self.seed = seed
        self.eod = eod

    def _sample(self, i: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, i])
        sample = np.empty(self.seq_length + 1, dtype=np.int64)
        at = 0
        while at < len(sample):
            length = 2 + int(rng.integers(max(1, 2 * self.seq_length // 3)))
            sample[at : at + length] = self._document(rng, length)[: len(sample) - at]
            at += length
        return sample

    def _document(self, rng: np.random.Generator, length: int) -> np.ndarray:
        words = self.vocab_size if self.eod is None else self.vocab_size - 1
        document = (rng.integers(words) + rng.integers(1, 4) * np.arange(length)) % words
        if self.eod is not None:
            document += document >= self.eod  # skip the id of eod
            document[-1] = self.eod
        return document


class MockMaskedDataset(_MockSamples):
    """Mock samples for BERT. Sentences count up from a random token and fill half of a sample to all of it."""

    def __init__(
        self, vocab_size: int, seq_length: int, num_samples: int, seed: int, masking: Masking
    ) -> None:
        if vocab_size <= len(SPECIAL):
            raise ConfigError(
                f"model.vocab_size {vocab_size} has no entries besides {', '.join(SPECIAL)} for mock samples; raise "
                "model.vocab_size"
            )
        begins_word = np.ones(vocab_size, dtype=bool)
        self._word_bounds = WordPieces(*range(len(SPECIAL)), vocab_size, begins_word)
        self.seq_length, self.num_samples, self.seed, self._masking = seq_length, num_samples, seed, masking

    def _sample(self, i: int) -> np.ndarray:
        rng = np.random.RandomState([self.seed, i])
        max_tokens, words = self.seq_length - SPECIAL_COUNT, self._word_bounds.vocab_size - len(SPECIAL)
        length = rng.randint(max(2, max_tokens // 2), max_tokens + 1)
        cut = rng.randint(1, length)
        sentences = [
            (len(SPECIAL) + (rng.randint(words) + rng.randint(1, 4) * np.arange(count)) % words).tolist()
            for count in (cut, length - cut)
        ]
        return make_sample(sentences, max_tokens, self.seq_length, self._word_bounds, self._masking, rng)


class MockPairDataset(_MockSamples):
    """Mock samples for T5.

    The encoder's tokens count up from a random one in steps of 1, 2 or 3; the decoder's continue them.

    Each sequence fills between half of its length and all of it.
    """

    def __init__(
        self, vocab_size: int, encoder_length: int, length: int, num_samples: int, seed: int
    ) -> None:
        self.vocab_size, self.num_samples, self.seed = vocab_size, num_samples, seed
        self.lengths, self._dtype = (encoder_length, length), pair_dtype(encoder_length, length)

    def _sample(self, i: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, i])
        encoder_tokens, decoder_tokens = (
            int(rng.integers((size + 1) // 2, size + 1)) for size in self.lengths
        )
        words = self.vocab_size - 1  # all but the start token, 0
        count = (
            rng.integers(words) + rng.integers(1, 4) * np.arange(encoder_tokens + decoder_tokens)
        ) % words + 1
        sample = np.zeros((), self._dtype)
        sample["text_enc"][:encoder_tokens], sample["enc_mask"][:encoder_tokens] = (
            count[:encoder_tokens],
            True,
        )
        sample["labels"][:decoder_tokens], sample["loss_mask"][:decoder_tokens] = count[encoder_tokens:], 1.0
        sample["text_dec"][0], sample["text_dec"][1:decoder_tokens] = DECODER_START, count[encoder_tokens:-1]
        return sample
