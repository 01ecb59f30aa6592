"""Encoding of a block of JSON Lines into token arrays: the part of preprocessing that the workers run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megalith.data.preprocessing.jsonl import BadLine, LineBlock, TextRecord, parse_block
from megalith.data.preprocessing.sentences import split_sentences
from megalith.data.tokenizers.open_tokenizer import Tokenizer
from megalith.errors import DataError


@dataclass(frozen=True)
class Column:
    """The documents of one JSON key. Empty documents and sentences are already left out.

    `tokens` [n], in the dataset's dtype; `sequence_lengths` int64 [sequences]; `sequences` int64 [documents],
    how many sequences each document has (1, unless sentences are split).
    """

    tokens: np.ndarray
    sequence_lengths: np.ndarray
    sequences: np.ndarray


@dataclass(frozen=True)
class EncodedBlock:
    """`columns`: one a JSON key. `empty`: documents that have no token, over all keys."""

    columns: list[Column]
    empty: int
    bad_lines: list[BadLine]


@dataclass(frozen=True)
class BlockEncoder:
    """A function LineBlock → EncodedBlock that can be sent to another process."""

    tokenizer: Tokenizer
    json_keys: Sequence[str]
    dtype: np.dtype
    append_eod: bool
    split_sentences: bool
    max_line_bytes: int

    def __call__(self, block: LineBlock) -> EncodedBlock:
        records, bad_lines = parse_block(block, self.json_keys, self.max_line_bytes)
        try:
            columns = [self._column(records, k) for k in range(len(self.json_keys))]
        except DataError:  # some text cannot be encoded: find out which
            records, refused = self._sift(block, records)
            bad_lines = sorted(bad_lines + refused, key=lambda bad: bad.line)
            columns = [self._column(records, k) for k in range(len(self.json_keys))]
        empty = sum(len(records) - len(column.sequences) for column in columns)
        return EncodedBlock(columns, empty, bad_lines)

    def _column(self, records: list[TextRecord], key: int) -> Column:
        texts = [record.texts[key] for record in records]
        documents = (
            [split_sentences(text) for text in texts] if self.split_sentences else [[t] for t in texts]
        )
        encoded = iter(self.tokenizer.encode_batch([piece for pieces in documents for piece in pieces]))
        eod = [self.tokenizer.eod]
        parts: list[np.ndarray] = []
        lengths: list[int] = []
        sequences: list[int] = []
        for pieces in documents:
            before = len(lengths)
            for ids in (next(encoded) for _ in pieces):
                if len(ids):
                    parts.append(np.asarray(ids, np.int32))
                    lengths.append(len(ids))
            if len(lengths) > before:
                sequences.append(len(lengths) - before)
                if self.append_eod:
                    parts.append(np.asarray(eod, np.int32))
                    lengths[-1] += 1
        tokens = np.concatenate(parts) if parts else np.empty(0, np.int32)
        self._check_ids(tokens)
        return Column(
            tokens.astype(self.dtype), np.asarray(lengths, np.int64), np.asarray(sequences, np.int64)
        )

    def _check_ids(self, tokens: np.ndarray) -> None:
        if tokens.size and not (tokens.min() >= 0 and tokens.max() < self.tokenizer.vocab_size):
            raise DataError(
                f"the tokenizer gave ids {tokens.min()} to {tokens.max()}, but its vocab_size is "
                f"{self.tokenizer.vocab_size}; its files do not belong together"
            )

    def _sift(self, block: LineBlock, records: list[TextRecord]) -> tuple[list[TextRecord], list[BadLine]]:
        """The records that the tokenizer takes, and a BadLine for each that it refuses."""
        taken, refused = [], []
        for record in records:
            try:
                for key in range(len(self.json_keys)):
                    self._column([record], key)
                taken.append(record)
            except DataError as error:
                refused.append(BadLine(block.path, record.line, record.offset, str(error)))
        return taken, refused


OWN_THREADS = "TOKENIZERS_PARALLELISM"  # which the tokenizers library reads at each call


def start_worker(encoder: BlockEncoder) -> None:
    """Make this process, started for the purpose, a worker that encodes with `encoder` on one core."""
    global _encoder
    _encoder = encoder
    os.environ[OWN_THREADS] = "false"  # one worker, one core
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process is interrupted, and ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def encode_in_worker(block: LineBlock) -> EncodedBlock:
    return _encoder(block)


def _end_with_parent() -> None:
    """A main process that was killed leaves no workers behind."""
    multiprocessing.parent_process().join()
    os._exit(1)


_encoder: BlockEncoder  # of a worker process, set once by start_worker
