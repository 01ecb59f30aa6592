"""Pre-training samples with few cut documents: best-fit packing (Ding et al. 2024, arXiv:2404.10830).

A row has seq_length + 1 tokens. A longer document is divided into pieces of that length. Each piece begins with the
last token of the piece before it, so every token is a label once. The pieces are put into rows from the longest to the
shortest, each into the fullest row that has room for it. Free space at the end of a row is padding.

The number of pieces of each length, and so the division of a row into lengths, is the same in every epoch. The seed and
the epoch determine which of the pieces of equal length a row gets, their order in the row, and the order of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megalith.data.batch import PADDING
from megalith.data.best_fit import pack
from megalith.data.indexed import IndexedDataset
from megalith.errors import DataError
from megalith.progress import Progress
from megalith.tables import counted


class PackedDataset:
    """Packed rows of the sequences `[first_sequence, last_sequence)` of an indexed dataset.

    Sample i is int64 [seq_length + 1], filled up with PADDING. An epoch has `samples_per_epoch` samples; the dataset
    has as many complete epochs as `num_samples` requires. A piece takes 8 bytes of memory, and 4 bytes per epoch.

    Raises:
        DataError: if the range has no tokens.
    """

    pads = True

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
        self.indexed, self.seq_length = indexed, seq_length
        self.document_lengths = lengths = indexed.sequence_lengths[first_sequence:last_sequence]
        self._documents, self._starts, piece_lengths = divide(lengths, seq_length)
        if not len(self._documents):
            raise DataError(
                f"{indexed.prefix} has no document with tokens in its sequences [{first_sequence}, "
                f"{last_sequence}); increase this split's share, or add data"
            )
        self._documents += first_sequence
        by_length = np.argsort(-piece_lengths, kind="stable")
        rows, self.samples_per_epoch = pack(piece_lengths[by_length], seq_length + 1)
        self._row_starts = np.concatenate([[0], np.cumsum(np.bincount(rows))])
        squares = np.square(piece_lengths[by_length].astype(np.float64))
        self._attention_costs = np.bincount(
            rows, weights=squares
        )  # the division into lengths is the same per epoch
        self.fill = float(piece_lengths.sum(dtype=np.int64) / (self.samples_per_epoch * (seq_length + 1)))
        self.cut_documents = int((lengths > seq_length + 1).sum())
        self.num_documents = len(lengths)
        epochs = max(1, math.ceil(num_samples / self.samples_per_epoch))
        self._pieces, self._rows = [], []  # per epoch: pieces in the order of rows, and the order of rows
        for epoch in range(epochs):
            rng = np.random.RandomState([seed, epoch])
            shuffled = rng.permutation(len(piece_lengths)).astype(np.int32)
            longest_first = np.argsort(-piece_lengths[shuffled], kind="stable")
            order = np.lexsort((rng.permutation(len(rows)), rows))
            self._pieces.append(shuffled[longest_first[order]])
            self._rows.append(rng.permutation(self.samples_per_epoch).astype(np.int32))
            if progress is not None:
                progress.add(num_samples / epochs)

    def __len__(self) -> int:
        return len(self._rows) * self.samples_per_epoch

    def __getitem__(self, i: int) -> np.ndarray:
        if not 0 <= i < len(self):
            raise IndexError(
                f"sample {i} is out of range of {self.indexed.prefix}, which has {counted(len(self), 'sample')}"
            )
        epoch, at = divmod(i, self.samples_per_epoch)
        row = int(self._rows[epoch][at])
        sample, filled = np.full(self.seq_length + 1, PADDING, dtype=np.int64), 0
        for piece in self._pieces[epoch][self._row_starts[row] : self._row_starts[row + 1]]:
            document, start = int(self._documents[piece]), int(self._starts[piece])
            length = min(int(self.indexed.sequence_lengths[document]) - start, self.seq_length + 1)
            sample[filled : filled + length] = self.indexed.get(document, start, length)
            filled += length
        return sample

    def attention_cost(self, indices: Sequence[int]) -> np.ndarray:
        """Return the sum of squared document lengths of each sample, float64 [indices]."""
        rows = [int(self._rows[i // self.samples_per_epoch][i % self.samples_per_epoch]) for i in indices]
        return self._attention_costs[rows]

    def describe(self, i: int) -> str:
        return f"sample {i} of {self.indexed.prefix}"

    def epochs(self) -> dict[str, int]:
        return {self.indexed.prefix: len(self._rows)}

    def samples_in_epochs(self, epochs: float) -> int:
        """Return the number of samples in `epochs` epochs. Both may be fractional."""
        return int(epochs * self.samples_per_epoch)

    def preserves_order(self, num_samples: int, permuted: bool = False) -> bool:
        # Each epoch is packed by itself.
        return not permuted or max(1, math.ceil(num_samples / self.samples_per_epoch)) == len(self._rows)


def divide(lengths: np.ndarray, seq_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split documents into pieces of at most seq_length + 1 tokens. Adjacent pieces overlap by one token.

    Args:
        lengths: tokens of each document, int32 [documents].
        seq_length: tokens per sample without the label of its last token.

    Returns:
        The document, the first token and the length of each piece, int32 [pieces].
    """
    counts = np.where(lengths > 0, np.maximum(1, -(-(lengths.astype(np.int64) - 1) // seq_length)), 0)
    documents = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
    number = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = (number * seq_length).astype(np.int32)
    return documents, starts, np.minimum(lengths[documents] - starts, seq_length + 1).astype(np.int32)
