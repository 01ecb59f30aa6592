"""Lanes, which define the deterministic sample order of a stream.

A stream is divided into lanes. Their number does not depend on the number of ranks. In each pass over the data, its
shards (files, or shards of a hub dataset) are permuted, and lane l of n reads shards l, l + n, l + 2n, … of that order.
Its documents are shuffled in windows: whole blocks are read until there are `shuffle_buffer` documents, which are
permuted and used up before the next window is read. A position therefore consists of a few numbers, and a resumed run
reads one window again. The documents are concatenated and cut into samples of seq_length + 1 tokens, each of which
begins with the last token of the previous sample. Sample p of the stream is sample p // n of lane p % n.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megalith.config.data import TextDocuments
from megalith.data.inputs.blocks import MAX_DOCUMENT_BYTES, BadLine, TextRecord
from megalith.data.streams.stream_shards import Shard, ShardReader
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import DataError
from megalith.tables import counted

WINDOW_BYTES = 16 << 20  # a window of long documents has fewer than shuffle_buffer
CHUNK = 32  # documents per call of the tokenizer
BAD_LINES_KEPT = 20  # per lane
Document = tuple[Shard, TextRecord]


@dataclass(frozen=True)
class StreamSettings:
    """Settings of a stream of text. With equal settings, every process produces the same samples."""

    entry: str
    """Entry of the data path, for errors."""
    shards: Sequence[Shard]
    lanes: int
    seq_length: int
    seed: int
    tokenizer: Tokenizer
    repeat: bool
    """Begin another pass at the end; otherwise the end is an error."""
    shuffle_buffer: int
    """Documents per window; 1: the order of the files."""
    text_key: str = "text"
    text_documents: TextDocuments = "file"
    append_eod: bool = True
    skip_bad_documents: bool = False

    def shards_of(self, lane: int, pass_number: int) -> list[Shard]:
        """Return the shards that a lane reads in an epoch, in order."""
        order = np.random.default_rng([self.seed, pass_number]).permutation(len(self.shards))
        if self.shuffle_buffer == 1:
            order = np.arange(len(self.shards))
        return [self.shards[i] for i in order[lane :: self.lanes]]


@dataclass(frozen=True)
class LanePosition:
    """Position of a lane before a document or sample. It is stored in checkpoints."""

    samples: int = 0
    """Number of the lane's samples before this position."""
    pass_number: int = 0
    shard: int = 0
    """Index among the lane's shards of the pass. Together with `block`, it gives the start of the window."""
    block: int = 0
    document: int = 0
    """Documents of the window before this position."""
    token: int = 0
    """Tokens of the current document before this position."""
    documents: int = 0
    """Documents read before this position, including empty ones."""
    empty: int = 0
    """Documents without tokens before this position, including those that the tokenizer refuses."""
    skipped: int = 0
    """Number of unusable documents before the end of the window."""

    def to_list(self) -> list[int]:
        return [getattr(self, name) for name in self.__dataclass_fields__]


class Lane:
    """Samples of one lane, starting at a position.

    Raises:
        DataError: from `next_sample`, for unusable text or at the end of a stream that is read once.
    """

    def __init__(self, settings: StreamSettings, number: int, position: LanePosition | None = None):
        self._settings, self._number = settings, number
        self._reader = ShardReader(settings.text_key, settings.text_documents)
        self.position = position or LanePosition()
        self.skipped = self.position.skipped
        """Number of unusable documents so far, including those of the whole current window."""
        self._is_counted = self.position.samples > 0  # the window of the first document has been read before
        self.bad_lines: list[str] = []
        """Descriptions of the first unusable documents since the list was last cleared."""
        self._bad_lines_left = BAD_LINES_KEPT
        self._pending: deque[tuple[LanePosition, np.ndarray]] = deque()  # documents, from the next token on
        self._num_tokens = 0  # in _pending
        self._documents = self._read(self.position)

    def next_sample(self) -> np.ndarray:
        """Return the next sample, int32 [seq_length + 1], and advance `position`."""
        length = self._settings.seq_length
        while self._num_tokens < length + 1:
            position, ids = next(self._documents)
            self._pending.append((position, ids))
            self._num_tokens += len(ids)
        parts, wanted = [], length + 1
        for _, ids in self._pending:
            parts.append(ids[:wanted])
            wanted -= len(parts[-1])
            if not wanted:
                break
        self._drop(length)
        origin, _ = self._pending[0]
        self.position = replace(origin, samples=self.position.samples + 1)
        return np.concatenate(parts)

    def _drop(self, count: int) -> None:
        self._num_tokens -= count
        while count:
            position, ids = self._pending.popleft()
            dropped = min(count, len(ids))
            count -= dropped
            if dropped < len(ids):
                position = replace(position, token=position.token + dropped)
                self._pending.appendleft((position, ids[dropped:]))

    def _read(self, start: LanePosition) -> Iterator[tuple[LanePosition, np.ndarray]]:
        """Yield the ids of each document that has tokens, and the position before the document."""
        settings, position = self._settings, start
        while True:
            with_tokens = position.documents - position.empty
            shards = settings.shards_of(self._number, position.pass_number)
            for shard, block, records in self._windows(shards, position.shard, position.block):
                if (shard, block) != (position.shard, position.block):
                    position = replace(position, shard=shard, block=block, document=0)
                position = replace(position, skipped=self.skipped)
                for chunk in self._shuffled(position, records):
                    for ids in self._encode(chunk):
                        token = position.token
                        if len(ids):
                            yield position, ids[token:]
                        position = replace(
                            position,
                            document=position.document + 1,
                            token=0,
                            documents=position.documents + 1,
                            empty=position.empty + (len(ids) == 0),
                        )
            if not settings.repeat or position.documents - position.empty == with_tokens:
                raise self._ended(shards, position)
            position = replace(position, pass_number=position.pass_number + 1, shard=0, block=0, document=0)

    def _windows(
        self, shards: Sequence[Shard], first_shard: int, first_block: int
    ) -> Iterator[tuple[int, int, list[Document]]]:
        """Yield shard and block at the start of each window, and its documents."""
        window, records, size = (0, 0), [], 0
        for at in range(first_shard, len(shards)):
            for number, block in self._reader.blocks(shards[at], first_block if at == first_shard else 0):
                if not records:
                    window = at, number
                good, bad = block.parse([self._settings.text_key], MAX_DOCUMENT_BYTES)
                self._note_bad(bad)
                self.skipped += 0 if self._is_counted else len(bad)
                records += [(shards[at], record) for record in good]
                size += block.num_bytes
                if records and (len(records) >= self._settings.shuffle_buffer or size >= WINDOW_BYTES):
                    yield *window, records
                    records, size, self._is_counted = [], 0, False
        if records:
            yield *window, records
            self._is_counted = False

    def _shuffled(self, position: LanePosition, records: list[Document]) -> Iterator[list[Document]]:
        """Yield the documents of a window in chunks, permuted, without those before `position`."""
        settings, order = self._settings, np.arange(len(records))
        if settings.shuffle_buffer > 1:
            key = [settings.seed, self._number, position.pass_number, position.shard, position.block]
            order = np.random.default_rng(key).permutation(len(records))
        for first in range(position.document, len(order), CHUNK):
            yield [records[i] for i in order[first : first + CHUNK]]

    def _encode(self, documents: list[Document]) -> list[np.ndarray]:
        """Return the ids of each document, int32. The array is empty if the document has no tokens or cannot be
        encoded.
        """
        tokenizer = self._settings.tokenizer
        try:
            batches = tokenizer.encode_batch([record.texts[0] for _, record in documents])
            return [self._checked(ids) for ids in batches]
        except DataError as error:
            if len(documents) > 1:
                return [ids for document in documents for ids in self._encode([document])]
            [(shard, record)] = documents
            self._note_bad([BadLine(shard, record.line, record.offset, str(error))])  # counts as empty
            return [np.empty(0, np.int32)]

    def _checked(self, ids: Sequence[int]) -> np.ndarray:
        tokenizer = self._settings.tokenizer
        tokens = np.asarray(ids, np.int32)
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < tokenizer.vocab_size):
            raise DataError(
                f"the tokenizer returned ids {tokens.min()} to {tokens.max()}, but its vocab_size is "
                f"{tokenizer.vocab_size}; so its files do not belong together; copy all of them from one "
                "source"
            )
        return (
            np.append(tokens, np.int32(tokenizer.eod))
            if len(tokens) and self._settings.append_eod
            else tokens
        )

    def _note_bad(self, bad_lines: Sequence[BadLine]) -> None:
        if bad_lines and not self._settings.skip_bad_documents:
            raise DataError(
                f"{bad_lines[0]}; {bad_lines[0].way_out('data.text_key')}correct or remove it, or set "
                "data.skip_bad_documents to skip and count such documents"
            )
        kept = [str(bad) for bad in bad_lines[: self._bad_lines_left]]
        self._bad_lines_left -= len(kept)
        self.bad_lines += kept

    def _ended(self, shards: Sequence[Shard], position: LanePosition) -> DataError:
        settings, last = self._settings, f" (the last one is {shards[-1]})" if shards else ""
        documents = f"{counted(position.documents, 'document')} ({position.empty:,} empty)"
        if self.skipped:
            documents += f", {self.skipped:,} more skipped as unusable"
            documents += f" (the first: {self.bad_lines[0]})" if self.bad_lines else ""
        if settings.repeat:
            way_out = "remove empty shards, or set data.stream_lanes to 1"
            if settings.lanes == 1:
                way_out = "check the files and data.text_key"
            return DataError(
                f"{settings.entry} has no tokens in the {counted(len(shards), 'shard')} of lane "
                f"{self._number + 1} of {settings.lanes}{last}: {documents}; {way_out}"
            )
        return DataError(
            f"{settings.entry} ended: lane {self._number + 1} of {settings.lanes} has read its "
            f"{counted(len(shards), 'shard')}{last}, {documents}, and made "
            f"{counted(self.position.samples, 'sample')} ({self._num_tokens:,} tokens are left over), but "
            "the run needs more; lower train.train_iters, add data, or set "
            "data.dataloader_type to cyclic to read it again"
        )
