"""Megatron's GPT sample stream, without index files.

The documents of a split, repeated for as many epochs as needed, are shuffled and concatenated. Sample j is the S + 1
tokens that start at token j * S (the last token of a sample is the first of the next: an input and its label), and a
second shuffle maps i to j. Megatron walks over the concatenation once and stores where each sample starts. Here the
start is found on demand by binary search in the cumulative sums of every 64th document. Opening a dataset costs only
the two shuffles, and memory holds 4 bytes per document and epoch and 4 bytes per sample.
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
from megalith.tables import counted

SPLITS = ("train", "valid", "test")
BLOCK = 64  # documents between two stored cumulative sums; idx_format.CHUNK is a multiple of it


class SampleDataset(Protocol):
    """Interface of a dataset for a Loader. Sample i is an int64 array of seq_length + 1 tokens."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> np.ndarray: ...

    def describe(self, i: int) -> str:
        """Return the origin of sample i for an error message."""

    def epochs(self) -> dict[str, int]:
        """Return the number of epochs over the documents, by dataset prefix."""

    def preserves_order(self, num_samples: int, permuted: bool = False) -> bool:
        """Return True if a dataset built for `num_samples` samples would have the same samples at the same positions.

        If the run permutes all samples (`permuted`), the length must stay the same too.
        """


class GPTDataset:
    """The samples of sequences `[first_sequence, last_sequence)` of an indexed dataset.

    Sample i is int64 [seq_length + 1]. There are `(epochs * tokens - 1) // seq_length` samples, at least
    `num_samples`; `epochs` is the smallest number that suffices. `progress` advances by `num_samples` during the
    shuffles and sums.

    Raises:
        DataError: if the range has fewer tokens than one sample.
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
        self.document_lengths = indexed.sequence_lengths[first_sequence:last_sequence]
        self.seq_length, self.seed = seq_length, seed
        documents = np.arange(first_sequence, last_sequence, dtype=np.int32)
        tokens = int(indexed.sequence_lengths[first_sequence:last_sequence].sum(dtype=np.int64))
        if tokens < seq_length + 1:
            raise DataError(
                f"{indexed.prefix} has {len(documents)} documents with {tokens} tokens in its sequences "
                f"[{first_sequence}, {last_sequence}), but one sample takes seq_length + 1 = {seq_length + 1} "
                "tokens; increase this split's share, lower seq_length, or add data"
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

        def on_progress(entries: int) -> None:
            if progress is not None:
                progress.add(entries * share)

        for array, cut in ((self._documents, document_cut), (self._order, sample_cut)):
            for part in (array[:cut], array[cut:]):
                if len(part):
                    rng.shuffle(part)
                    on_progress(len(part))
        self._block_starts = self._cumulative_sums(on_progress)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, i: int) -> np.ndarray:
        if not 0 <= i < len(self):
            raise IndexError(
                f"sample {i} is out of range of {self.indexed.prefix}, which has {counted(len(self), 'sample')}"
            )
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
        return {self.indexed.prefix: self._plan[0]}

    @property
    def samples_per_epoch(self) -> float:
        """Number of samples per epoch, fractional."""
        return self._tokens / self.seq_length

    def samples_in_epochs(self, epochs: float) -> int:
        """Return the number of samples in `epochs` epochs. Both may be fractional."""
        return max(0, int((epochs * self._tokens - 1) // self.seq_length))

    def preserves_order(self, num_samples: int, permuted: bool = False) -> bool:
        # Equal plans have the same length.
        return epoch_plan(self._tokens, self.seq_length, num_samples) == self._plan

    def _cumulative_sums(self, on_progress: Callable[[int], None]) -> np.ndarray:
        """Return the number of tokens before every BLOCK-th entry of the shuffled documents, int64 [blocks]."""
        sums = [np.zeros(1, dtype=np.int64)]
        for rows in chunks(len(self._documents)):
            lengths = self.indexed.sequence_lengths[self._documents[rows]]
            sums.append(np.add.reduceat(lengths, np.arange(0, len(lengths), BLOCK), dtype=np.int64))
            on_progress(len(lengths))
        return np.cumsum(np.concatenate(sums))[:-1]

    def _locate(self, token: int) -> tuple[int, int]:
        """Return the entry of the shuffled documents that holds `token` of the concatenation, and the position within
        it."""
        block = int(np.searchsorted(self._block_starts, token, side="right")) - 1
        at = block * BLOCK
        lengths = self.indexed.sequence_lengths[self._documents[at : at + BLOCK]]
        ends = self._block_starts[block] + np.cumsum(lengths, dtype=np.int64)
        k = int(np.searchsorted(ends, token, side="right"))  # skips documents without tokens
        return at + k, token - int(ends[k] - lengths[k])


def epoch_plan(tokens: int, seq_length: int, num_samples: int) -> tuple[int, int | None]:
    """Return the number of epochs, and the number of samples before the last epoch if that is shuffled separately,
    otherwise None.

    The last epoch is shuffled separately if less than 80 % of it is used; if it were mixed with the other epochs, its
    documents would displace documents that have been read less often.
    """
    epochs = max(1, -(-(num_samples * seq_length + 1) // tokens))
    if epochs == 1:
        return 1, None
    before_last = ((epochs - 1) * tokens - 1) // seq_length
    threshold = int(0.8 * ((tokens - 1) // seq_length))
    return epochs, before_last if num_samples - before_last < threshold else None


def parse_split(split: str) -> tuple[float, float, float, float]:
    """Return the cumulative fractions of a split: `"969,30,1"` → (0.0, 0.969, 0.999, 1.0).

    Raises:
        ConfigError: unless it is one to three weights of at least 0, not all 0.
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
    """Return the sequences `[first, last)` of train, validation and test. Each bound is round(fraction *
    num_sequences).
    """
    bounds = [round(share * num_sequences) for share in parse_split(split)]
    return [(bounds[0], bounds[1]), (bounds[1], bounds[2]), (bounds[2], bounds[3])]
