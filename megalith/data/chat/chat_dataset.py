"""Rows of chat samples: padded, one sample a row, or packed, several whole ones in each.

Packing is best fit, decreasing: the longest samples first, each into the row with the least room that still takes it.
It leaves a few per cent of padding, cuts no sample, and follows from the lengths and the seed alone. In a packed row
attention stays inside a sample (`document_ends`) and positions begin again at 0 with each, so a sample's loss is what
it is alone. A row is a sequence to everything else: batch sizes, epochs and the position in the data count rows.
"""

from __future__ import annotations

import copy
from bisect import bisect_left, insort
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from megalith.config.data import DataConfig
from megalith.config.rl import ChatConfig
from megalith.data.batch import Batch, document_ends
from megalith.data.chat.chat_files import chat_files
from megalith.data.chat.samples import Samples, cached_samples
from megalith.data.dataset import SPLITS, parse_split, split_ranges
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import DataError


def best_fit_decreasing(lengths: np.ndarray, room: int, seed: int) -> list[list[int]]:
    """Which samples share a row of `room` tokens; rows and what is in them are in the samples' order.

    Samples of one length are taken in an order made of the seed.
    """
    order = np.random.default_rng([seed, len(lengths)]).permutation(len(lengths))
    order = order[np.argsort(-lengths[order], kind="stable")]
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # tokens that are free → the rows
    rooms: list[int] = []  # the keys of with_room, sorted
    for sample in order.tolist():
        length = int(lengths[sample])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row, free = len(rows), room
            rows.append([])
        else:
            free = rooms[at]
            row = with_room[free].pop()
            if not with_room[free]:
                del with_room[free], rooms[at]
        rows[row].append(sample)
        left = free - length
        if left:
            if left not in with_room:
                with_room[left] = []
                insort(rooms, left)
            with_room[left].append(row)
    return sorted(sorted(row) for row in rows)


class ChatDataset:
    """Rows of `seq_length` tokens out of samples [first, last) of `samples`.

    Row i is int64 [4, seq_length]: tokens, the label of each, 1 where the label is learned, and the sample's number
    in the row; `make_chat_batch` makes a Batch of several. Padding follows the last sample and belongs to it. Of pairs
    it is two rows, [2, 4, seq_length]: one with the chosen answers of its samples, one with the rejected ones.
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
        self.shape = (4, seq_length) if samples.each == 1 else (samples.each, 4, seq_length)
        of_samples = samples.lengths.reshape(-1, samples.each)[first:last]  # [samples, each]
        lengths = of_samples.max(1)
        rows = (
            best_fit_decreasing(lengths, seq_length, seed) if packing else [[i] for i in range(len(lengths))]
        )
        self._members = first + np.array([i for row in rows for i in row], dtype=np.int64)
        self._starts = np.cumsum([0, *map(len, rows)])
        sizes = of_samples[self._members - first]  # [members, each]
        of_members = np.stack([sizes.sum(1), np.square(sizes).sum(1)], axis=1)
        self.work = np.add.reduceat(of_members, self._starts[:-1])
        """Of each row its tokens, and the sum of its sequences' squared lengths: int64 [rows, 2]."""
        self._length, self.num_rows = len(rows), len(rows)
        self.num_samples, self.num_tokens = len(lengths), int(of_samples.sum())

    def filled_up(self, global_batch_size: int) -> ChatDataset:
        """The same with rows of nothing but padding behind it, to whole global batches: an evaluation takes each row
        once."""
        other = copy.copy(self)
        other._length = -(-self.num_rows // global_batch_size) * global_batch_size
        return other

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> np.ndarray:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of chat data that has {len(self)}")
        members, each = self._samples_of(i), self.samples.each
        rows = [self._row([sample * each + side for sample in members]) for side in range(each)]
        return np.stack(rows).reshape(self.shape)

    def _row(self, sequences: list[int]) -> np.ndarray:
        row = np.zeros((4, self.seq_length), dtype=np.int64)
        row[:2], at = self.padding, 0
        for number, sequence in enumerate(sequences):
            start, end = self.samples.starts[sequence : sequence + 2]
            length = int(end - start)
            row[0, at : at + length] = self.samples.tokens[start:end]
            row[1, at : at + length - 1] = self.samples.tokens[start + 1 : end]
            row[2, at : at + length - 1] = self.samples.learned[start + 1 : end]
            row[3, at:] = number
            at += length
        return row

    def _samples_of(self, i: int) -> list[int]:
        return self._members[self._starts[i] : self._starts[i + 1]].tolist() if i < self.num_rows else []

    def describe(self, i: int) -> str:
        return "the row of " + ", ".join(self.samples.places[sample] for sample in self._samples_of(i))

    def epochs(self) -> dict[str, int]:
        return {}

    def preserves_order(self, num_samples: int, permuted: bool = False) -> bool:
        return True  # rows do not depend on the length of the run

    def identity(self) -> dict[str, int | str]:
        """What tells whether the rows are the same: `rows`, and `samples_sha256`."""
        return {"rows": self.num_rows, "samples_sha256": self.samples.identity()}

    def note(self, packing: bool) -> str:
        """How full the rows are."""
        each, sequences = self.samples.each, self.num_samples / self.num_rows
        share = 100 * self.num_tokens / (self.num_rows * each * self.seq_length)
        packed = f", {sequences:.1f} sequences a row" if packing else ", padded"
        twice = "" if each == 1 else f"{each} × "
        return f"{twice}{self.num_rows:,} rows of {self.seq_length:,}: {share:.1f} % of tokens{packed}"


def make_chat_batch(rows: np.ndarray, sample_numbers: np.ndarray) -> Batch:
    """A Batch from int64 rows [batch, 4, seq] and their places in the stream, int64 [batch]."""
    tokens, labels, learned = (torch.from_numpy(rows[:, k].copy()) for k in range(3))  # [batch, seq]
    positions = np.broadcast_to(np.arange(rows.shape[2]), tokens.shape)
    begins = np.diff(rows[:, 3], axis=1, prepend=rows[:, 3, :1]) != 0
    positions = positions - np.maximum.accumulate(np.where(begins, positions, 0), axis=1)
    return Batch(
        input_ids=tokens,
        labels=labels,
        loss_mask=learned.float(),
        position_ids=torch.from_numpy(positions),
        document_ends=document_ends(begins),
        sample_numbers=torch.from_numpy(sample_numbers),
    )


class ChatSplits(NamedTuple):
    """A run's chat data. A split that there is none of is None."""

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
    """The rows of the run's splits: shares of data_path by `split`, or what the data path of each names, whole.

    All of it is tokenized, by one process of those that share `cache` (`cached_samples`). DataError: a bad sample, or a
    split without any.
    """
    own = (data.train_data_path, data.valid_data_path, data.test_data_path)
    named = own if data.data_path is None else (data.data_path,)
    files = [None if path is None else chat_files(path) for path in named]
    longest = data.seq_length
    of_files = [
        cached_samples(cache, each, tokenizer, chat, longest, vocab_size, may_write) if each else None
        for each in files
    ]
    if len(files) == 1:
        bounds, ranges = parse_split(data.split), split_ranges(data.split, len(of_files[0]))
        of_files *= len(SPLITS)
    else:
        ranges = [(0, len(samples)) if samples else (0, 0) for samples in of_files]
    padding = tokenizer.eod if tokenizer is not None and tokenizer.eod is not None else 0
    parts: list[ChatDataset | None] = []
    notes = []
    for name, samples, (first, last) in zip(SPLITS, of_files, ranges):
        if first == last:
            parts.append(None)
            if name == "valid" and len(files) == 1 and bounds[1] < bounds[2]:
                notes.append(
                    f"valid: none of the {len(samples):,} samples, by data.split {data.split}; nothing is evaluated"
                )
            continue
        rows = ChatDataset(samples, first, last, longest, packing=chat.packing, seed=seed, padding=padding)
        parts.append(rows)
        notes.append(f"{name}: {rows.num_samples:,} samples in {rows.note(chat.packing)}")
    if parts[0] is None:
        raise DataError(
            f"the train share of data.split {data.split} has none of the samples; give it a larger one, or add data"
        )
    for samples in {id(samples): samples for samples in of_files if samples}.values():
        notes += [f"{count:,} samples were {what}" for what, count in samples.counts.items()]
        notes += [f"the first of the unusable: {samples.first_bad}"] * bool(samples.first_bad)
    return ChatSplits(*parts, notes)
