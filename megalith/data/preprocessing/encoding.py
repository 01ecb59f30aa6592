"""Encodes blocks of documents as token arrays. Preprocessing workers run this code."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megalith.data.inputs.blocks import BadLine, DocumentBlock, TextRecord
from megalith.data.preprocessing.sentences import split_sentences
from megalith.data.tokenizers.open_tokenizer import Tokenizer
from megalith.errors import DataError


@dataclass(frozen=True)
class Column:
    """The encoded documents under one JSON key. Empty documents and empty sentences are omitted.

    `tokens` [n] in the dataset's dtype; `sequence_lengths` int64 [sequences]; `sequences` int64 [documents], the
    number of sequences per document (1 unless sentences are split).
    """

    tokens: np.ndarray
    sequence_lengths: np.ndarray
    sequences: np.ndarray


@dataclass(frozen=True)
class EncodedBlock:
    """Tokens of a block.

    `columns` has one entry per JSON key. `empty` is the number of documents without tokens, over all keys.
    """

    columns: list[Column]
    empty: int
    bad_lines: list[BadLine]


@dataclass(frozen=True)
class BlockEncoder:
    """A picklable function DocumentBlock → EncodedBlock."""

    tokenizer: Tokenizer
    json_keys: Sequence[str]
    dtype: np.dtype
    append_eod: bool
    split_sentences: bool
    max_line_bytes: int
    special_tokens: bool = False
    """Surround each sequence by the tokenizer's special tokens, as calling a tokenizer of transformers does."""

    def __call__(self, block: DocumentBlock) -> EncodedBlock:
        records, bad_lines = block.parse(self.json_keys, self.max_line_bytes)
        try:
            columns = [self._column(records, k) for k in range(len(self.json_keys))]
        except DataError:  # some text cannot be encoded: find out which
            records, bad = self._split_bad_records(block, records)
            bad_lines = sorted(bad_lines + bad, key=lambda bad: bad.line)
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
        before_text, after_text = (
            (self.tokenizer.prefix, self.tokenizer.suffix) if self.special_tokens else ([], [])
        )
        parts: list[np.ndarray] = []
        lengths: list[int] = []
        sequences: list[int] = []
        for pieces in documents:
            before = len(lengths)
            for ids in (next(encoded) for _ in pieces):
                if len(ids):
                    ids = [*before_text, *ids, *after_text] if before_text or after_text else ids
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
                f"the tokenizer returned ids {tokens.min()} to {tokens.max()}, but its vocab_size is "
                f"{self.tokenizer.vocab_size}; so its files do not belong together; copy all of them from one "
                "source"
            )

    def _split_bad_records(
        self, block: DocumentBlock, records: list[TextRecord]
    ) -> tuple[list[TextRecord], list[BadLine]]:
        """Return the records that the tokenizer accepts, and a BadLine for each record that it rejects."""
        good, bad = [], []
        for record in records:
            try:
                for key in range(len(self.json_keys)):
                    self._column([record], key)
                good.append(record)
            except DataError as error:
                bad.append(BadLine(block.path, record.line, record.offset, str(error)))
        return good, bad


LIBRARY_THREADS = "TOKENIZERS_PARALLELISM"  # the tokenizers library reads it at each call


def start_worker(encoder: BlockEncoder) -> None:
    """Initialize a worker process that encodes with `encoder` on one core."""
    global _encoder
    _encoder = encoder
    os.environ[LIBRARY_THREADS] = "false"  # one worker, one core
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles interrupts and ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def encode_in_worker(block: DocumentBlock) -> EncodedBlock:
    return _encoder(block)


def _end_with_parent() -> None:
    """End this worker when the main process ends, even if it is killed."""
    multiprocessing.parent_process().join()
    os._exit(1)


_encoder: BlockEncoder  # set once per worker process by start_worker
