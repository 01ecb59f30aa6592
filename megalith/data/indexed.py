"""Megatron's indexed dataset: a `.bin` with raw tokens and an `.idx` with the position of each sequence.

Opening reads and checks only the `.idx` (idx_format.py), memory-mapped. Tokens are read from the `.bin` on demand with
`pread`, which lets other threads run meanwhile and reports a truncated file as an error, where a memory map would raise
SIGBUS. The writer uses temporary names and renames at the end, the `.idx` last, so that a pair of files is always
complete. In an object store the `.bin` is uploaded while it is written, and the `.idx` after it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from megalith.data.dataset_tokenizer import DatasetTokenizer, merged_record, record_path
from megalith.data.idx_format import (
    CODES,
    HEADER,
    MAGIC,
    VERSION,
    TokenFile,
    chunks,
    file_pair,
    map_index,
    read_header,
    require_files,
)
from megalith.errors import DataError
from megalith.io import data_errors, make_folder, sync_file, sync_folder
from megalith.remote import StorePath

TERABYTE = 2**40  # expected maximum size of a `.bin` in an object store


def best_dtype(vocab_size: int) -> np.dtype:
    """Return uint16 if every id fits with Megatron's margin (vocab_size < 65,500), else int32."""
    return np.dtype("<u2") if vocab_size < 65_500 else np.dtype("<i4")


class IndexedDataset:
    """A dataset in `{prefix}.bin` and `{prefix}.idx`.

    `sequence_lengths` int32 [S], `sequence_offsets` int64 [S] (bytes) and `document_indices` int64 [D] are read-only
    views of the `.idx`.

    Raises:
        DataError: at opening, if a file is missing, truncated or inconsistent.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self.bin_path, self.idx_path = require_files(self.prefix)
        index = self._index = map_index(self.idx_path)
        self._tokens = TokenFile(self.bin_path)
        self.dtype, sequences, documents = read_header(self.idx_path, index, len(index))
        at = HEADER.size
        self.sequence_lengths = np.frombuffer(index, "<i4", sequences, at)
        at += self.sequence_lengths.nbytes
        self.sequence_offsets = np.frombuffer(index, "<i8", sequences, at)
        at += self.sequence_offsets.nbytes
        self.document_indices = np.frombuffer(index, "<i8", documents, at)
        self.has_modes = len(index) > at + self.document_indices.nbytes
        self._check_sequences()
        self._check_documents()

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.sequence_lengths)

    def __reduce__(self) -> tuple:
        """Pickle only the prefix; the receiving process opens the files itself."""
        return IndexedDataset, (self.prefix,)

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    def document_lengths(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """Return the number of tokens of the documents `[first, last)`, int64.

        `last` defaults to the number of documents.
        """
        bounds = self.document_indices[first : self.num_documents + 1 if last is None else last + 1]
        sums = np.concatenate([[0], np.cumsum(self.sequence_lengths, dtype=np.int64)])
        return np.diff(sums[bounds])

    @property
    def num_tokens(self) -> int:
        return int(self.sequence_lengths.sum(dtype=np.int64))

    def identity(self) -> dict[str, int | str]:
        """Return the file sizes `bin_bytes` and `idx_bytes`, and the hash `idx_sha256`. Tokens are not read."""
        return {
            "bin_bytes": self._tokens.size,
            "idx_bytes": len(self._index),
            "idx_sha256": hashlib.sha256(self._index).hexdigest(),
        }

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return the tokens `[offset, offset + length)` of sequence i, read-only.

        `length` defaults to the rest of the sequence.
        """
        size = int(self.sequence_lengths[i])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(
                f"tokens [{offset}, {offset + length}) are out of range of sequence {i} of "
                f"{self.prefix}, which has {size} tokens"
            )
        start = int(self.sequence_offsets[i]) + offset * self.dtype.itemsize
        return np.frombuffer(self._tokens.read(start, length * self.dtype.itemsize), self.dtype)

    def is_packed(self) -> bool:
        """Return True if the sequences fill the `.bin` in order and without gaps, as all writers produce it."""
        end = 0
        for rows in chunks(len(self)):
            offsets, end = _packed_offsets(self.sequence_lengths[rows], self.dtype, end)
            if not np.array_equal(self.sequence_offsets[rows], offsets):
                return False
        return end == self._tokens.size

    def _check_sequences(self) -> None:
        size, item = self._tokens.size, self.dtype.itemsize
        for rows in chunks(len(self)):
            lengths, offsets = self.sequence_lengths[rows], self.sequence_offsets[rows]
            too_long = offsets > size - _sizes(lengths, self.dtype)
            bad = (lengths < 0) | (offsets < 0) | too_long
            if bad.any():
                i = rows.start + int(bad.argmax())
                raise DataError(
                    f"{self.idx_path} has sequence {i} at byte {self.sequence_offsets[i]} with "
                    f"{self.sequence_lengths[i]} tokens of {item} bytes, but {self.bin_path} has {size} bytes, so "
                    "the .bin is truncated or the two files are not a pair; copy both again, or preprocess again"
                )

    def _check_documents(self) -> None:
        indices, path = self.document_indices, self.idx_path
        if len(indices) == 0 or indices[0] != 0 or indices[-1] > len(self):
            bounds = f"{indices[0]} to {indices[-1]}" if len(indices) else "nothing"
            raise DataError(
                f"{path} lists document indices from {bounds}, but they must begin at 0 and end within its "
                f"{len(self)} sequences; the file is damaged: copy it again or preprocess again"
            )
        for rows in chunks(len(indices) - 1):
            decreases = indices[rows] > indices[rows.start + 1 : rows.stop + 1]
            if decreases.any():
                d = rows.start + int(decreases.argmax())
                raise DataError(
                    f"{path} has document index {indices[d]} followed by {indices[d + 1]} at entry {d + 1}, "
                    "but document indices must not decrease; the file is damaged: copy it again or preprocess again"
                )


class IndexedWriter:
    """Context manager that writes `{prefix}.bin` and `{prefix}.idx`, byte for byte like Megatron's writer.

    Files have `.partial` names until a clean exit syncs them and renames the `.bin`, then the `.idx`. On an exception
    they are removed. After a kill they remain under a name that no reader opens.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: np.dtype | type,
        *,
        overwrite: bool = False,
        tokenizer: DatasetTokenizer | None = None,
    ) -> None:
        """Open the files.

        Args:
            prefix: path or URL.
            dtype: type of the tokens.
            overwrite: replace existing files.
            tokenizer: the tokenizer that makes the tokens, recorded in `{prefix}.tokenizer.json`; None: no record.

        Raises:
            DataError: the format does not support `dtype`, or a file exists and `overwrite` is off.
        """
        self.bin_path, self.idx_path = file_pair(prefix)
        self._tokenizer, self._record_path = tokenizer, record_path(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODES:
            choices = ", ".join(str(d) for d in CODES)
            raise DataError(f"token dtype {self.dtype} cannot be written; choose one of {choices}")
        self._lengths = array("i")  # tokens of each sequence
        self._documents = array("q", [0])  # the document indices
        suffix = f"partial-{os.getpid()}-{secrets.token_hex(4)}"
        outputs = self.bin_path, self.idx_path, self._record_path
        self._partials = [Path(f"{path}.{suffix}") for path in outputs]
        with data_errors(self.bin_path), contextlib.ExitStack() as cleanup:
            if isinstance(self.bin_path, Path):
                cleanup.callback(_PrefixLock(prefix).close)
            for path in () if overwrite else (self.bin_path, self.idx_path):
                if path.exists():
                    raise DataError(
                        f"{path} already exists; remove it, choose another output prefix, or set "
                        "overwrite (--overwrite)"
                    )
            if isinstance(self.bin_path, StorePath):
                self._file = cleanup.enter_context(self.bin_path.create(TERABYTE))
            else:
                self._file = open(self._partials[0], "xb", buffering=1 << 20)  # noqa: SIM115 (closed in __exit__)
                cleanup.callback(self._clear)
            self._cleanup = cleanup.pop_all()

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._cleanup.__exit__(kind, error, trace)
            return
        with data_errors(self.bin_path), self._cleanup:
            self._finish()

    def _clear(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        for path in self._partials:
            path.unlink(missing_ok=True)

    def add_document(self, tokens: np.ndarray, sequence_lengths: Sequence[int] | None = None) -> None:
        """Add a document: `tokens` [n], any integer dtype, as one sequence or split into `sequence_lengths`."""
        tokens = np.asarray(tokens)
        self._add(
            tokens, np.asarray([tokens.size] if sequence_lengths is None else sequence_lengths, np.int64)
        )
        self._documents.append(len(self._lengths))

    def add_documents(self, flat_tokens: np.ndarray, document_lengths: np.ndarray) -> None:
        """Add single-sequence documents: `flat_tokens` [sum of lengths], `document_lengths` [documents]."""
        first = len(self._lengths)
        self._add(np.asarray(flat_tokens), np.asarray(document_lengths, np.int64))
        ends = np.arange(first + 1, len(self._lengths) + 1, dtype=np.int64)
        self._documents.frombytes(ends.tobytes())

    def add_dataset(self, dataset: IndexedDataset) -> None:
        """Add every document of another indexed dataset.

        Raises DataError unless it has the same token dtype and no modes.
        """
        if dataset.dtype != self.dtype:
            raise DataError(
                f"{dataset.prefix} holds {dataset.dtype} tokens and {self.bin_path} {self.dtype}; only datasets of "
                "the same tokenizer and dtype can be merged"
            )
        if dataset.has_modes:
            raise DataError(
                f"{dataset.idx_path} has modes (a multimodal dataset), which a merge would lose; leave it out"
            )
        with data_errors(self.bin_path):
            if dataset.is_packed():
                with dataset.bin_path.open("rb") as source:
                    shutil.copyfileobj(source, self._file, 1 << 24)
            else:
                for i in range(len(dataset)):
                    self._file.write(dataset.get(i).data)
        first = len(self._lengths)
        for rows in chunks(len(dataset)):
            self._lengths.frombytes(dataset.sequence_lengths[rows].tobytes())
        for rows in chunks(dataset.num_documents):
            ends = dataset.document_indices[rows.start + 1 : rows.stop + 1] + first
            self._documents.frombytes(ends.tobytes())

    def _add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        if lengths.size and (lengths.min() < 0 or lengths.max() > np.iinfo(np.int32).max):
            raise DataError(
                f"a sequence must have 0 to 2^31 - 1 tokens, but these have {lengths.min()} to {lengths.max()}"
            )
        if tokens.ndim != 1 or tokens.size != lengths.sum():
            raise DataError(
                f"tokens of shape {list(tokens.shape)} do not fill sequences of {lengths.sum()} tokens; the "
                "lengths must add up to the number of tokens"
            )
        if tokens.size and tokens.dtype != self.dtype:
            low, high, limits = tokens.min(), tokens.max(), np.iinfo(self.dtype)
            if tokens.dtype.kind not in "iu" or low < limits.min or high > limits.max:
                raise DataError(
                    f"{tokens.dtype} token ids {low} to {high} do not fit {self.dtype} "
                    f"({limits.min} to {limits.max}); open the writer with best_dtype(vocab_size)"
                )
        with data_errors(self.bin_path):
            self._file.write(np.ascontiguousarray(tokens, self.dtype).data)
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())

    def _finish(self) -> None:
        if isinstance(self.idx_path, StorePath):
            self.idx_path.unlink(missing_ok=True)  # an old .idx must never be paired with a new .bin
            self._cleanup.pop_all().close()  # completes the upload of the .bin
            self._record_path.unlink(missing_ok=True)
            if (record := self._record()) is not None:
                self._record_path.write(record)
            with self.idx_path.create() as file:
                self._write_index(file)
            return
        bin_partial, idx_partial, record_partial = self._partials
        sync_file(self._file)
        with open(idx_partial, "xb") as file:
            self._write_index(file)
            sync_file(file)
        self.idx_path.unlink(missing_ok=True)
        self._record_path.unlink(missing_ok=True)
        os.replace(bin_partial, self.bin_path)
        if (record := self._record()) is not None:
            with open(record_partial, "xb") as file:
                file.write(record)
                sync_file(file)
            os.replace(record_partial, self._record_path)
        os.replace(idx_partial, self.idx_path)
        sync_folder(self.idx_path.parent)

    def _record(self) -> bytes | None:
        """Return the content of the tokenizer's record."""
        if self._tokenizer is None:
            return None
        tokens = int(np.frombuffer(self._lengths, np.int32).sum(dtype=np.int64))
        idx_bytes = HEADER.size + 12 * len(self._lengths) + 8 * len(self._documents)
        return self._tokenizer.of_files(tokens * self.dtype.itemsize, idx_bytes).to_json()

    def _write_index(self, file: IO[bytes]) -> None:
        lengths, end = np.frombuffer(self._lengths, np.int32), 0
        file.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], len(lengths), len(self._documents)))
        file.write(lengths.data)
        for rows in chunks(len(lengths)):
            offsets, end = _packed_offsets(lengths[rows], self.dtype, end)
            file.write(offsets.data)
        file.write(self._documents)


class _PrefixLock:
    """Lock file `PREFIX.lock`. It prevents two writers from leaving the .bin of one and the .idx of the other.

    The kernel releases the lock when the process that holds it ends.
    """

    def __init__(self, prefix: str | Path):
        self.path = Path(f"{prefix}.lock")
        self._descriptor: int | None = None
        while self._descriptor is None:  # retry if the previous holder has just removed the file
            self._descriptor = self._acquire()

    def _acquire(self) -> int | None:
        with data_errors(self.path):
            make_folder(self.path.parent)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise DataError(
                f"another process is writing {str(self.path).removesuffix('.lock')}; wait for it to end, or choose "
                "another output prefix"
            ) from None
        except OSError:  # the file system has no locks: write without
            pass
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)
        return None

    def close(self) -> None:
        if self._descriptor is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None


def merge(prefixes: Sequence[str | Path], output_prefix: str | Path, *, overwrite: bool = False) -> None:
    """Write the documents of `prefixes`, one dataset after another, as one dataset at `output_prefix`.

    Raises DataError if there are none or they cannot be merged.
    """
    if not prefixes:
        raise DataError(f"there is nothing to merge into {output_prefix}; pass at least one dataset prefix")
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    options = {"overwrite": overwrite, "tokenizer": merged_record(prefixes)}
    with IndexedWriter(output_prefix, datasets[0].dtype, **options) as writer:
        for dataset in datasets:
            writer.add_dataset(dataset)


def _packed_offsets(lengths: np.ndarray, dtype: np.dtype, start: int) -> tuple[np.ndarray, int]:
    """Return the byte offset of each sequence, int64, and the end offset, for sequences stored without gaps from byte
    `start`.
    """
    sizes = _sizes(lengths, dtype)
    ends = np.cumsum(sizes) + start
    return ends - sizes, int(ends[-1])


def _sizes(lengths: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the sizes of sequences in bytes, int64. Computed in int64, because numpy 1 would multiply int32 by a
    scalar in int32 and overflow.
    """
    return np.multiply(lengths, dtype.itemsize, dtype=np.int64)
