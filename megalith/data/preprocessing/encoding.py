"""Turns a block of JSON Lines into token arrays: the part of preprocessing that worker processes run.

Cuts text into sentences, by rule: no model, no language data.

A sentence ends at `.`, `!`, `?` or `…` (and the quotes or brackets that close after it) when white space and
anything but a lower-case letter follow, unless the full stop belongs to an abbreviation or an initial; at
`。`, `！` and `？`; and before a blank line. White space stays with the sentence after it, so that the
sentences joined are the text again. Every pattern runs in time linear in the text.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megalith.data.preprocessing.jsonl import BadLine, LineBlock, TextRecord, parse_block
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


def start_worker(encoder: BlockEncoder) -> None:
    """Make this process, started for the purpose, a worker that encodes with `encoder` on one core."""
    global _encoder
    _encoder = encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one worker, one core; the library reads it at each call
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process is interrupted, and ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def encode_in_worker(block: LineBlock) -> EncodedBlock:
    return _encoder(block)


def _end_with_parent() -> None:
    """A main process that was killed leaves no workers behind."""
    multiprocessing.parent_process().join()
    os._exit(1)


_encoder: BlockEncoder  # of a worker process, set once by start_worker


_BOUNDARY = re.compile(
    r"""(?<![.!?…])(?P<stop>[.!?…]++)["'”’»)\]]*+(?=\s++(?P<next>\S))"""
    r"""|[。！？]++[”’」』）]*+"""
    r"""|(?<=\S)(?=[^\S\n]*+\n[^\S\n]*+\n)"""
)

_ABBREVIATION = re.compile(
    r"mr|mrs|ms|dr|prof|sr|jr|st|vs|etc|cf|al|inc|ltd|co|corp|nos|vol|vols|fig|figs|eq|eqs|sec|pp|eds|approx"
    r"|dept|est|gen|gov|rep|sen|col|capt|lt|sgt|rev|hon|jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec",
    re.IGNORECASE,
)
_LONGEST_WORD = 16


def split_sentences(text: str) -> list[str]:
    """The sentences of `text`, none of them blank; joined they are `text`. A blank text has none."""
    sentences: list[str] = []
    start = 0
    for boundary in _BOUNDARY.finditer(text):
        if boundary["stop"] and not _ends_sentence(text, boundary):
            continue
        sentence = text[start : boundary.end()]
        if sentence and not sentence.isspace():
            sentences.append(sentence)
            start = boundary.end()
    rest = text[start:]
    if rest.isspace() and sentences:
        sentences[-1] += rest
    elif rest and not rest.isspace():
        sentences.append(rest)
    return sentences


def _ends_sentence(text: str, boundary: re.Match[str]) -> bool:
    if boundary["next"].islower():
        return False
    if boundary["stop"] != ".":
        return True
    at = boundary.start("stop")
    words = text[max(0, at - _LONGEST_WORD) : at].split()
    word = words[-1].lstrip("(['\"“‘") if words and not text[at - 1].isspace() else ""
    initial = len(word) == 1 and word.isalpha()
    return not (initial or "." in word or _ABBREVIATION.fullmatch(word))
