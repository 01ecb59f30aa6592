"""Which tokens sample i holds: Megatron's GPT sample stream, with no index file built or cached.

The documents of a split, tiled over as many epochs as the samples need, are shuffled and read as one long
concatenation. Sample j is the S + 1 tokens from token j * S on (the last token of a sample is the first of the
next: an input and its label), and a second shuffle says which j is the i-th sample. Megatron walks the
concatenation once and stores where each sample begins; here the beginning is found when it is asked for, by a
binary search in the cumulative sums of every 64th document. So opening costs the two shuffles and little else,
and memory holds 4 bytes for each document of each epoch and 4 bytes for each sample.

Made-up samples, for a first run or a speed test without data files.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np

from megalith.data.idx_format import chunks
from megalith.data.indexed import IndexedDataset
from megalith.errors import ConfigError, DataError
from megalith.progress import Progress

SPLITS = ("train", "valid", "test")
BLOCK = 64  # documents between two stored cumulative sums; idx_format.CHUNK is a multiple of it


class SampleDataset(Protocol):
    """What a loader reads: sample i is an int64 array of seq_length + 1 tokens."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> np.ndarray: ...

    def describe(self, i: int) -> str:
        """Where sample i comes from, for an error message."""

    def epochs(self) -> dict[str, int]:
        """How often the samples go over the documents of each dataset."""

    def preserves_order(self, num_samples: int, permuted: bool = False) -> bool:
        """Whether a dataset made for so many samples has the same ones at the positions that both have; if they are
        `permuted` all together, it has to be as long too."""


class GPTDataset:
    """The samples of sequences `[first_sequence, last_sequence)` of an indexed dataset.

    Sample i is int64 [seq_length + 1]. There are `(epochs * tokens - 1) // seq_length` samples, which is at least
    `num_samples`: `epochs` is the smallest number that suffices. A range that holds no document, or not enough
    tokens for one sample, is a DataError. `progress` counts `num_samples`, by the shuffles and sums that they take.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        first_sequence: int,
        last_sequence: int,
        seq_length: int,
        num_samples: int,
        seed: int,
        progress: Progress | None = None,
    ) -> None:
        self.indexed = indexed
        self.seq_length = seq_length
        documents = np.arange(first_sequence, last_sequence, dtype=np.int32)
        tokens = int(indexed.sequence_lengths[first_sequence:last_sequence].sum(dtype=np.int64))
        if tokens < seq_length + 1:
            raise DataError(
                f"{indexed.prefix} has {len(documents)} documents with {tokens} tokens in its sequences "
                f"[{first_sequence}, {last_sequence}), but one sample takes seq_length + 1 = {seq_length + 1} "
                "tokens; give this split a larger share, lower seq_length, or add data"
            )
        self._tokens, self._plan = tokens, epoch_plan(tokens, seq_length, num_samples)
        epochs, samples_before_last = self._plan
        samples = (epochs * tokens - 1) // seq_length
        rng = np.random.RandomState(seed)
        self._documents = documents if epochs == 1 else np.tile(documents, epochs)  # [epochs * documents]
        self._order = np.arange(samples, dtype=np.uint32 if samples < 2**32 - 2 else np.int64)
        if samples_before_last is None:
            document_cut, sample_cut = len(self._documents), samples
        else:
            document_cut, sample_cut = len(documents) * (epochs - 1), samples_before_last
        share = num_samples / (2 * len(self._documents) + samples)

        def told(entries: int) -> None:
            if progress is not None:
                progress.add(entries * share)

        for array, cut in ((self._documents, document_cut), (self._order, sample_cut)):
            for part in (array[:cut], array[cut:]):
                if len(part):
                    rng.shuffle(part)
                    told(len(part))
        self._block_starts = self._cumulative_sums(told)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, i: int) -> np.ndarray:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {self.indexed.prefix}, which has {len(self)}")
        sample = np.empty(self.seq_length + 1, dtype=np.int64)
        at, offset = self._locate(int(self._order[i]) * self.seq_length)
        filled = 0
        while filled < len(sample):
            document = int(self._documents[at])
            length = min(int(self.indexed.sequence_lengths[document]) - offset, len(sample) - filled)
            sample[filled : filled + length] = self.indexed.get(document, offset, length)
            filled += length
            at, offset = at + 1, 0
        return sample

    def describe(self, i: int) -> str:
        return f"sample {i} of {self.indexed.prefix}"

    def epochs(self) -> dict[str, int]:
        """How often the samples go over the documents, by the data's prefix."""
        return {self.indexed.prefix: self._plan[0]}

    def preserves_order(self, num_samples: int, permuted: bool = False) -> bool:
        # Of the same plan it is as long.
        return epoch_plan(self._tokens, self.seq_length, num_samples) == self._plan

    def _cumulative_sums(self, told: Callable[[int], None]) -> np.ndarray:
        """The tokens before every BLOCK-th entry of the shuffled documents, int64 [blocks]; `told` of so many more."""
        sums = [np.zeros(1, dtype=np.int64)]
        for rows in chunks(len(self._documents)):
            lengths = self.indexed.sequence_lengths[self._documents[rows]]
            sums.append(np.add.reduceat(lengths, np.arange(0, len(lengths), BLOCK), dtype=np.int64))
            told(len(lengths))
        return np.cumsum(np.concatenate(sums))[:-1]

    def _locate(self, token: int) -> tuple[int, int]:
        """The entry of the shuffled documents that holds `token` of the concatenation, and the place in it."""
        block = int(np.searchsorted(self._block_starts, token, side="right")) - 1
        at = block * BLOCK
        lengths = self.indexed.sequence_lengths[self._documents[at : at + BLOCK]]
        ends = self._block_starts[block] + np.cumsum(lengths, dtype=np.int64)
        k = int(np.searchsorted(ends, token, side="right"))  # passes over documents with no tokens
        return at + k, token - int(ends[k] - lengths[k])


def epoch_plan(tokens: int, seq_length: int, num_samples: int) -> tuple[int, int | None]:
    """The epochs that `num_samples` take, and the samples before the last epoch if it is shuffled alone.

    The last epoch is shuffled alone when less than 80 % of it is used: mixed with the others, its documents
    would push out some that have not been read as often.
    """
    epochs = max(1, -(-(num_samples * seq_length + 1) // tokens))
    if epochs == 1:
        return 1, None
    before_last = ((epochs - 1) * tokens - 1) // seq_length
    enough = int(0.8 * ((tokens - 1) // seq_length))
    return epochs, before_last if num_samples - before_last < enough else None


def parse_split(split: str) -> tuple[float, float, float, float]:
    """`"969,30,1"` → (0.0, 0.969, 0.999, 1.0): train, valid and test lie between neighbours.

    One to three weights of at least 0, not all 0; ConfigError otherwise.
    """
    try:
        weights = [float(part) for part in split.split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or not all(0 <= w < math.inf for w in weights) or sum(weights) == 0:
        raise ConfigError(
            f"split {split!r} is not one to three numbers of at least 0 with a sum above 0; "
            "write the shares of train, valid and test as in 99,1,0"
        )
    train, valid, test = (w / sum(weights) for w in [*weights, 0.0, 0.0][:3])
    return 0.0, 0.0 + train, train + valid, train + valid + test


def split_ranges(split: str, num_sequences: int) -> list[tuple[int, int]]:
    """The sequences `[first, last)` of train, valid and test: each bound is round(share * num_sequences)."""
    bounds = [round(share * num_sequences) for share in parse_split(split)]
    return [(bounds[0], bounds[1]), (bounds[1], bounds[2]), (bounds[2], bounds[3])]


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

    def preserves_order(self, num_samples: int, permuted: bool = False) -> bool:
        return not permuted or num_samples == len(self)

    def _document(self, rng: np.random.Generator, length: int) -> np.ndarray:
        words = self.vocab_size if self.eod is None else self.vocab_size - 1
        document = (rng.integers(words) + rng.integers(1, 4) * np.arange(length)) % words
        if self.eod is not None:
            document += document >= self.eod  # leaves the id of the end to the end
            document[-1] = self.eod
        return document
