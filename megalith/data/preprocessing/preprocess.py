"""Preprocessing of text into Megatron's indexed datasets, on all cores.

The main process reads blocks of documents and writes tokens. Workers parse and encode one block each
(encoding.py) in any order. Results are written in input order, so the output does not depend on the number of
workers.

If a tokenizer encodes without holding Python's lock, workers are threads, which share its word cache: on two cores,
this takes a third less CPU time than two processes. Each thread encodes its block without the library's own threads,
which would free memory that other threads allocated. Parsing and passing ids to Python hold the lock for about 3 % of a
worker's time. On many cores, and for all other tokenizers, workers are therefore processes.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megalith.config.data import TextDocuments
from megalith.data.dataset_tokenizer import describe_tokenizer
from megalith.data.indexed import IndexedWriter, best_dtype
from megalith.data.inputs.blocks import MAX_DOCUMENT_BYTES, BadLine, DocumentBlock
from megalith.data.inputs.hub_dataset import Source
from megalith.data.inputs.row_tables import source_size
from megalith.data.inputs.source_versions import steady
from megalith.data.inputs.sources import expand_inputs, read_document_blocks
from megalith.data.preprocessing.encoding import (
    LIBRARY_THREADS,
    BlockEncoder,
    Column,
    EncodedBlock,
    encode_in_worker,
    start_worker,
)
from megalith.data.tokenizers.open_tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError, shorten
from megalith.progress import Progress

BLOCKS_PER_WORKER = 4  # prefetched, so that a slow block does not delay others
MAX_THREADS = 16  # cores that one process can keep busy
BAD_LINES_KEPT = 20


@dataclass
class PreprocessSummary:
    """Totals of a preprocessing run. `prefixes` and `documents` map each JSON key to the path of its dataset and to its
    number of documents.
    """

    prefixes: list[str]
    documents: list[int]
    sequences: int = 0
    tokens: int = 0
    bytes: int = 0
    """Uncompressed bytes of the input."""
    seconds: float = 0.0
    empty: int = 0
    """Number of documents without tokens, which are omitted."""
    skipped: int = 0
    """Number of unusable lines that were skipped (`on_error="skip"`)."""
    bad_lines: list[BadLine] = field(default_factory=list)
    """The first skipped lines."""
    sources: dict[Source, int] = field(default_factory=dict)
    """Number of documents per source, over all keys, without empty and unusable ones."""
    notes: list[str] = field(default_factory=list)
    """Sentences about files that were not read or have no documents."""

    def add(self, block: DocumentBlock, encoded: EncodedBlock) -> None:
        for k, column in enumerate(encoded.columns):
            self.documents[k] += len(column.sequences)
            self.sequences += len(column.sequence_lengths)
            self.tokens += len(column.tokens)
        count = sum(len(column.sequences) for column in encoded.columns)
        self.sources[block.path] = self.sources.get(block.path, 0) + count
        self.empty += encoded.empty
        self.bytes += block.num_bytes

    def progress_text(self) -> str:
        """Return a progress line: `1,234 documents | 5,678 tokens | 2.31 M tokens/s | 8.4 MB/s`."""
        documents, seconds = sum(self.documents), max(self.seconds, 1e-9)
        return (
            f"{documents:,} documents | {self.tokens:,} tokens | {self.tokens / seconds / 1e6:.2f} M tokens/s | "
            f"{self.bytes / seconds / 1e6:.1f} MB/s"
        )


class UnusableLineError(DataError):
    """Raised if preprocessing that stops at unusable lines finds a line that cannot be encoded."""

    def __init__(self, line: BadLine):
        super().__init__(
            f"{line}; {line.way_out('json_keys (--json-keys)')}correct or remove the line, or set on_error to skip "
            "(--on-error skip) to skip such lines"
        )
        self.line = line


class NoTokensError(DataError):
    """Raised if no document of the inputs has a token under a key."""

    def __init__(self, key: str, summary: PreprocessSummary, paths: Sequence[Source]):
        self.counts = f"{summary.empty:,} empty documents, {summary.skipped:,} skipped lines"
        if summary.bad_lines:
            self.counts += f", of which the first is {summary.bad_lines[0]}"
        files = shorten(list(map(str, paths)))
        super().__init__(
            f"no document of {files} has any token under the key {key!r} ({self.counts}); check the input files and "
            "json_keys"
        )


def preprocess(
    inputs: Sequence[str | Path],
    output_prefix: str | Path,
    tokenizer: Tokenizer,
    json_keys: Sequence[str] = ("text",),
    *,
    append_eod: bool = False,
    add_special_tokens: bool = False,
    split_sentences: bool = False,
    workers: int | None = None,
    on_error: Literal["stop", "skip"] = "stop",
    overwrite: bool = False,
    max_line_bytes: int = MAX_DOCUMENT_BYTES,
    text_documents: TextDocuments = "file",
    show_progress: bool = True,
) -> PreprocessSummary:
    """Encode text into the indexed datasets `{output_prefix}_{key}_document.{bin,idx}`, and record the tokenizer.

    Files are renamed to their final names after all are written. Worker processes import the main script, which must
    guard its start with `if __name__ == "__main__"`.

    Args:
        inputs: files, folders, globs and URLs (inputs/sources.py).
        output_prefix: path or URL.
        tokenizer: encodes the texts.
        json_keys: keys of the texts, each of which becomes a dataset.
        append_eod: end each document with the end-of-document token.
        add_special_tokens: add the special tokens of the tokenizer's files, such as BOS, before and after each
            sequence.
        split_sentences: make each sentence a sequence; the files are named `_sentence`.
        workers: number of processes. None means one per core; 0 encodes in this thread.
        on_error: stop at an unusable line, or skip and count it.
        overwrite: replace existing outputs.
        max_line_bytes: maximum length of a line or document.
        text_documents: "file" makes a .txt file one document, "block" each of its blocks between blank lines.
        show_progress: show a progress bar.

    Raises:
        ConfigError: for invalid arguments.
        DataError: for unusable input, or if no document has tokens.
    """
    _check_arguments(tokenizer, json_keys, append_eod, workers, on_error, max_line_bytes)
    level = "sentence" if split_sentences else "document"
    summary = PreprocessSummary([f"{output_prefix}_{key}_{level}" for key in json_keys], [0] * len(json_keys))
    paths = expand_inputs(inputs, summary.notes)
    dtype = best_dtype(tokenizer.vocab_size)
    encoder = BlockEncoder(
        tokenizer, json_keys, dtype, append_eod, split_sentences, max_line_bytes, add_special_tokens
    )
    workers = _usable_cores() if workers is None else workers
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        made_by = describe_tokenizer(tokenizer, tokenizer.eod if append_eod else None)
        writers = [
            stack.enter_context(IndexedWriter(prefix, dtype, overwrite=overwrite, tokenizer=made_by))
            for prefix in summary.prefixes
        ]
        read_before, total = _file_offsets(paths)
        progress = stack.enter_context(Progress("preprocess", total, show=show_progress))
        threaded = tokenizer.encodes_without_lock and 0 < workers <= MAX_THREADS
        blocks = itertools.chain.from_iterable(
            steady(path, read_document_blocks(path, json_keys, text_documents, max_line_bytes))
            for path in paths
        )
        pool = stack.enter_context(_threads(workers) if threaded else _processes(encoder, workers))
        results = stack.enter_context(contextlib.closing(_encode_in_order(blocks, encoder, pool)))
        for block, encoded in results:
            _count_bad_lines(summary, encoded.bad_lines, on_error)
            for writer, column in zip(writers, encoded.columns):
                _write(writer, column)
            summary.add(block, encoded)
            summary.seconds = time.monotonic() - start
            progress.update(read_before[block.path] + block.position, summary.progress_text())
        _check_not_empty(summary, json_keys, paths)
        if without := [str(path) for path in paths if not summary.sources.get(path)]:
            summary.notes.append(
                f"{len(without):,} of {len(paths):,} inputs have no document: {shorten(without)}"
            )
    summary.seconds = time.monotonic() - start
    return summary


@contextlib.contextmanager
def _threads(workers: int) -> Iterator[Executor]:
    """Yield a thread pool with one thread per core, with the tokenizers library's own threads disabled."""
    before = os.environ.get(LIBRARY_THREADS)
    os.environ[LIBRARY_THREADS] = "false"
    pool = ThreadPoolExecutor(workers)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        os.environ.pop(LIBRARY_THREADS) if before is None else os.environ.update({LIBRARY_THREADS: before})


@contextlib.contextmanager
def _processes(encoder: BlockEncoder, workers: int) -> Iterator[Executor | None]:
    """Yield a process pool with `workers` processes, or None for 0 workers."""
    if workers == 0:
        yield None
        return
    try:
        pool = ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), initializer=start_worker, initargs=(encoder,)
        )
    except OSError as error:
        raise DataError(
            f"{workers} worker processes cannot be started ({error.strerror}): they need space in "
            "/dev/shm; free some, or set 0 workers to encode in the main process"
        ) from error
    try:
        yield pool
    except BrokenProcessPool as error:
        raise DataError(
            f"one of {workers} worker processes ended early, because it was killed, perhaps out of memory, or "
            'because the main script does not guard its start with `if __name__ == "__main__"`; set fewer '
            "workers, or 0 to encode in the main process"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _encode_in_order(
    blocks: Iterable[DocumentBlock], encoder: BlockEncoder, pool: Executor | None
) -> Iterator[tuple[DocumentBlock, EncodedBlock]]:
    """Yield each block with its encoding, in the order of `blocks`, with a few blocks per worker in progress."""
    if pool is None:
        yield from ((block, encoder(block)) for block in blocks)
        return
    encode = encoder if isinstance(pool, ThreadPoolExecutor) else encode_in_worker
    pending: deque[tuple[DocumentBlock, Future[EncodedBlock]]] = deque()
    for block in blocks:
        pending.append((block, pool.submit(encode, block)))
        if len(pending) >= BLOCKS_PER_WORKER * pool._max_workers:
            block, future = pending.popleft()
            yield block, future.result()
    for block, future in pending:
        yield block, future.result()


def _write(writer: IndexedWriter, column: Column) -> None:
    if len(column.sequences) == len(column.sequence_lengths):
        writer.add_documents(column.tokens, column.sequence_lengths)
        return
    first_token = first_sequence = 0
    for count in column.sequences:
        lengths = column.sequence_lengths[first_sequence : first_sequence + count]
        end = first_token + int(lengths.sum())
        writer.add_document(column.tokens[first_token:end], lengths)
        first_token, first_sequence = end, first_sequence + int(count)


def _file_offsets(paths: Sequence[Source]) -> tuple[dict[Source, int], int]:
    """Return the number of input bytes before each file, and the total number."""
    sizes = [source_size(path) for path in paths]
    return dict(zip(paths, itertools.accumulate(sizes, initial=0))), sum(sizes)


def _count_bad_lines(summary: PreprocessSummary, bad_lines: Sequence[BadLine], on_error: str) -> None:
    if bad_lines and on_error == "stop":
        raise UnusableLineError(bad_lines[0])
    summary.skipped += len(bad_lines)
    summary.bad_lines += bad_lines[: BAD_LINES_KEPT - len(summary.bad_lines)]


def _check_not_empty(summary: PreprocessSummary, json_keys: Sequence[str], paths: Sequence[Source]) -> None:
    for key, documents in zip(json_keys, summary.documents):
        if documents == 0:
            raise NoTokensError(key, summary, paths)


def _check_arguments(
    tokenizer: Tokenizer,
    json_keys: Sequence[str],
    append_eod: bool,
    workers: int | None,
    on_error: str,
    max_line_bytes: int,
) -> None:
    if append_eod and tokenizer.eod is None:
        raise ConfigError(
            f"append_eod is set, but this {tokenizer.tokenizer_type} of {tokenizer.vocab_size} entries has no "
            "end-of-document token; add an eos_token to its tokenizer_config.json, or leave append_eod out"
        )
    if isinstance(json_keys, str) or not json_keys or len(set(json_keys)) < len(json_keys):
        raise ConfigError(f"json_keys {json_keys!r} is not a list of different keys; list each key once")
    for key in json_keys:
        if "/" in key or os.sep in key:
            raise ConfigError(f"json key {key!r} has a path separator and cannot name a file; rename the key")
    if on_error not in ("stop", "skip"):
        raise ConfigError(f"on_error is {on_error!r}; choose stop or skip")
    if workers is not None and workers < 0:
        raise ConfigError(f"workers is {workers}; choose 0 (this process) or a number of processes")
    if max_line_bytes < 1:
        raise ConfigError(f"max_line_bytes is {max_line_bytes}; choose a positive number of bytes")


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
