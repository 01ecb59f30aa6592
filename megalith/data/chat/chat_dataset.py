"""Rows of chat samples: one padded sample per row, or with packing several complete samples per row.

Packing is best fit decreasing: the longest samples first, each into the fullest row that has room for it. It leaves a
few percent of padding, splits no sample, and depends only on the lengths and the seed. In a packed row attention
stays within a sample (`document_ends`) and positions restart at 0, so a sample's loss is the same as without packing.
Batch sizes, epochs and positions in the data count rows.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from megalith.config.data import DataConfig
from megalith.config.fine_tuning import ChatConfig
from megalith.data.batch import Batch, document_ends
from megalith.data.best_fit import best_fit_decreasing
from megalith.data.chat.chat_files import chat_files
from megalith.data.chat.sample_cache import cached_samples
from megalith.data.chat.samples import Samples
from megalith.data.dataset import SPLITS, parse_split, split_ranges
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import DataError
from megalith.tables import counted


class ChatDataset:
    """Rows of `seq_length` tokens from samples [first, last) of `samples`.

    Row i is int64 [4, seq_length]: tokens, labels, 1 where the label is in the loss, and the index n of the sample
    within the row. For padding, it is ~n, the complement of the last sample's index. `make_chat_batch` collates rows.
    If the samples have values, a fifth line has them as the bits of float64. For pairs row i is [2, 4, seq_length]: the
    chosen answers, and the rejected ones.
    """

    def __init__(
        self,
        samples: Samples,
        first: int,
        last: int,
        seq_length: int,
        *,
        packing: bool,
        seed: int,
        padding: int,
    ):
        self.samples, self.seq_length, self.padding = samples, seq_length, padding
        count = samples.sequences_per_sample
        lines = 4 if samples.values is None else 5
        self.shape = (lines, seq_length) if count == 1 else (count, lines, seq_length)
        sample_lengths = samples.lengths.reshape(-1, count)[first:last]  # [samples, count]
        self.sequence_lengths = sample_lengths.reshape(-1)
        lengths = sample_lengths.max(1)
        rows = (
            best_fit_decreasing(lengths, seq_length, seed) if packing else [[i] for i in range(len(lengths))]
        )
        self._members = first + np.array([i for row in rows for i in row], dtype=np.int64)
        self._starts = np.cumsum([0, *map(len, rows)])
        sizes = sample_lengths[self._members - first]  # [members, each]
        member_work = np.stack([sizes.sum(1), np.square(sizes).sum(1)], axis=1)
        self.work = np.add.reduceat(member_work, self._starts[:-1])
        """int64 [rows, 2]: tokens per row, and the sum of the squared sequence lengths."""
        last = sizes[self._starts[1:] - 1]  # [rows, each]; padding belongs to the last sample of a row
        padding_tokens = seq_length - np.add.reduceat(sizes, self._starts[:-1])
        self._attention_costs = self.work[:, 1] + (padding_tokens * (2 * last + padding_tokens)).sum(1)
        self._length, self.num_rows = len(rows), len(rows)
        self.num_samples, self.num_tokens = len(lengths), int(sample_lengths.sum())

    def pad_to_batches(self, global_batch_size: int) -> ChatDataset:
        """Return a copy with padding rows up to a multiple of the global batch, so that evaluation reads each row
        once."""
        other = copy.copy(self)
        other._length = -(-self.num_rows // global_batch_size) * global_batch_size
        return other

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> np.ndarray:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} is out of range of chat data of {len(self)} rows")
        members, answers = self._samples_of(i), self.samples.sequences_per_sample
        rows = [
            self.packed_row([sample * answers + answer for sample in members], self.seq_length)
            for answer in range(answers)
        ]
        return np.stack(rows).reshape(self.shape)

    def sequences(self, i: int) -> list[int]:
        """Return the indices of the sequences in row i, to pass to `packed_row`.

        For data with one sequence per sample.
        """
        return self._samples_of(i)

    def attention_cost(self, indices: Sequence[int]) -> np.ndarray:
        """Return the sum of squared document lengths of each row, int64 [indices]."""
        return self._attention_costs[indices]

    def packed_row(self, sequences: Sequence[int], length: int) -> np.ndarray:
        """Return a row of these sequences with padding, int64 [lines, length]. ChatDataset describes the lines: there
        are 5 if samples have values, otherwise 4.
        """
        row = np.zeros((self.shape[-2], length), dtype=np.int64)
        row[:2], at = self.padding, 0
        for number, sequence in enumerate(sequences):
            start, end = self.samples.starts[sequence : sequence + 2]
            length = int(end - start)
            row[0, at : at + length] = self.samples.tokens[start:end]
            row[1, at : at + length - 1] = self.samples.tokens[start + 1 : end]
            row[2, at : at + length - 1] = self.samples.learned[start + 1 : end]
            row[3, at:] = number
            if self.samples.values is not None:
                row[4, at : at + length] = self.samples.values[start:end].astype(np.float64).view(np.int64)
            at += length
        row[3, at:] = ~max(len(sequences) - 1, 0)
        return row

    def _samples_of(self, i: int) -> list[int]:
        return self._members[self._starts[i] : self._starts[i + 1]].tolist() if i < self.num_rows else []

    def describe(self, i: int) -> str:
        return "the row of " + ", ".join(self.samples.sources[sample] for sample in self._samples_of(i))

    def epochs(self) -> dict[str, int]:
        return {}

    def preserves_order(self, num_samples: int, permuted: bool = False) -> bool:
        return True  # rows do not depend on the length of the run

    def identity(self) -> dict[str, int | str]:
        """Return the number of rows and a hash of them, to detect changes."""
        return {"rows": self.num_rows, "samples_sha256": self.samples.identity()}

    def note(self, packing: bool) -> str:
        """Return a note on the fraction of the rows that is not padding."""
        answers, sequences = self.samples.sequences_per_sample, self.num_samples / self.num_rows
        percent = 100 * self.num_tokens / (self.num_rows * answers * self.seq_length)
        layout = f", {sequences:.1f} sequences per row" if packing else ", padded"
        prefix = "" if answers == 1 else f"{answers} × "
        return f"{prefix}{counted(self.num_rows, 'row')} of {self.seq_length:,}: {percent:.1f} % of tokens{layout}"


def make_chat_batch(rows: np.ndarray, sample_numbers: np.ndarray) -> Batch:
    """Collate rows into a batch.

    Args:
        rows: int64 [batch, lines, seq]. The lines are tokens, labels, loss mask, document index (bitwise complement at
            padding) and, only if samples have values, the bits of the float64 value.
        sample_numbers: int64 [batch], positions in the stream of samples.
    """
    tokens, labels, learned = (torch.from_numpy(rows[:, k].copy()) for k in range(3))  # [batch, seq]
    positions = np.broadcast_to(np.arange(rows.shape[2]), tokens.shape)
    documents, padding = documents_and_padding(rows[:, 3])
    starts = np.diff(documents, axis=1, prepend=documents[:, :1]) != 0
    positions = positions - np.maximum.accumulate(np.where(starts, positions, 0), axis=1)
    return Batch(
        input_ids=tokens,
        labels=labels,
        loss_mask=learned.float(),
        position_ids=torch.from_numpy(positions),
        document_ends=document_ends(starts),
        sample_numbers=torch.from_numpy(sample_numbers),
        all_padding=torch.from_numpy(padding),
    )


def documents_and_padding(line: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the document index of each token (for padding, the index of the last document) and a mask of padding.

    `line`: the fourth line of rows, int64 [..., seq].
    """
    padding = line < 0
    return np.where(padding, ~line, line), padding


def row_values(rows: np.ndarray) -> torch.Tensor | None:
    """Return the value of each token's sample, float32 [..., seq], from rows [..., lines, seq]; None if the rows have
    no line of values.
    """
    if rows.shape[-2] == 4:
        return None
    return torch.from_numpy(np.ascontiguousarray(rows[..., 4, :]).view(np.float64).astype(np.float32))


class ChatSplits(NamedTuple):
    """The chat data of a run. Empty splits are None."""

    train: ChatDataset
    valid: ChatDataset | None
    test: ChatDataset | None
    notes: list[str]


def open_chat_data(
    data: DataConfig,
    chat: ChatConfig,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    seed: int,
    cache: Path,
    may_write: bool = True,
) -> ChatSplits:
    """Return the rows of the run's splits: data_path divided according to `split`, or one data path per split.

    All files are tokenized. With the folder `cache`, this happens once per machine (`cached_samples`).

    Raises:
        DataError: if a sample is unusable or a split is empty.
    """
    split_paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    paths = split_paths if data.data_path is None else (data.data_path,)
    notes: list[str] = []
    files = [None if path is None else chat_files(path, notes) for path in paths]
    seq_length = data.seq_length
    samples_by_split = [
        cached_samples(cache, split_files, tokenizer, chat, seq_length, vocab_size, may_write)
        if split_files
        else None
        for split_files in files
    ]
    if len(files) == 1:
        bounds, ranges = parse_split(data.split), split_ranges(data.split, len(samples_by_split[0]))
        samples_by_split *= len(SPLITS)
    else:
        ranges = [(0, len(samples)) if samples else (0, 0) for samples in samples_by_split]
    padding = tokenizer.eod if tokenizer is not None and tokenizer.eod is not None else 0
    parts: list[ChatDataset | None] = []
    for name, samples, (first, last) in zip(SPLITS, samples_by_split, ranges):
        if first == last:
            parts.append(None)
            if name == "valid" and len(files) == 1 and bounds[1] < bounds[2]:
                notes.append(
                    f"valid: data.split {data.split} gives this split none of the "
                    f"{counted(len(samples), 'sample')}, so there is no evaluation"
                )
            continue
        rows = ChatDataset(samples, first, last, seq_length, packing=chat.packing, seed=seed, padding=padding)
        parts.append(rows)
        notes.append(f"{name}: {counted(rows.num_samples, 'sample')} in {rows.note(chat.packing)}")
    if parts[0] is None:
        raise DataError(
            f"data.split {data.split} gives the train split no samples; raise the first number of data.split, or add "
            "data"
        )
    for samples in {id(samples): samples for samples in samples_by_split if samples}.values():
        notes += [f"{counted(count, 'sample')} {event}" for event, count in samples.counts.items()]
        notes += [f"the first unusable one: {samples.first_bad}"] * bool(samples.first_bad)
    return ChatSplits(*parts, notes)
