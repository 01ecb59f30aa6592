r"""The format of Megatron's `.idx` files, and reading of `.idx` and `.bin` from disk or object storage.

Little-endian: a header of 34 bytes, then plain arrays.

    b"MMIDIDX\x00\x00"   9 bytes
    version = 1          uint64
    dtype code           uint8       (DTYPES below)
    S, sequences         uint64
    D, document entries  uint64      (number of documents + 1)
    sequence lengths     int32[S]    in tokens
    sequence offsets     int64[S]    in bytes into the .bin
    document indices     int64[D]    document d is the sequences [indices[d], indices[d + 1]); indices[0] = 0
    modes                int8[S]     optional; multimodal datasets only
"""

from __future__ import annotations

import contextlib
import difflib
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from io import FileIO
from pathlib import Path

import numpy as np

from megalith.data.input_hints import file_hint
from megalith.errors import DataError
from megalith.remote import StorePath, is_url, open_location, size_of

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, S, D

DTYPES = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}  # 6 and 7 are float64 and float32, which cannot hold token ids
CODES = {dtype: code for code, dtype in DTYPES.items()}

BLOCK, CACHED_BLOCKS = 1 << 18, 256  # bytes per request to an object store, and number of cached blocks
CHUNK = 1 << 22  # elements per step, so that 100 million sequences need no large temporaries


def file_pair(prefix: str | Path) -> tuple[Path | StorePath, Path | StorePath]:
    """Return the paths or URLs of the `.bin` and the `.idx` of a prefix."""
    return open_location(f"{prefix}.bin"), open_location(f"{prefix}.idx")


def chunks(n: int) -> Iterator[slice]:
    """Yield slices of at most CHUNK elements that cover `range(n)`."""
    return (slice(start, min(start + CHUNK, n)) for start in range(0, n, CHUNK))


def read_header(path: Path | StorePath, index: mmap.mmap | bytes, size: int) -> tuple[np.dtype, int, int]:
    """Return the token dtype, S and D of an `.idx` of `size` bytes. Raise DataError if header or size are invalid."""
    if size < HEADER.size:
        raise DataError(
            f"{path} has {size} bytes, but the header alone takes {HEADER.size}; "
            "the file was truncated: copy it again or preprocess again"
        )
    magic, version, code, sequences, documents = HEADER.unpack(index[: HEADER.size])
    if magic != MAGIC:
        raise DataError(
            f"{path} begins with {magic!r}, but an indexed dataset begins with {MAGIC!r}; "
            "make it with megalith preprocess or with Megatron's preprocess_data.py"
        )
    if version != VERSION:
        raise DataError(
            f"{path} has version {version} at byte 9, but the format is version {VERSION}; preprocess again"
        )
    if code not in DTYPES:
        choices = ", ".join(f"{c} ({d})" for c, d in DTYPES.items())
        raise DataError(
            f"{path} has dtype code {code} at byte 17, but token ids are one of {choices}; preprocess again"
        )
    payload = HEADER.size + 12 * sequences + 8 * documents
    if size not in (payload, payload + sequences):
        raise DataError(
            f"{path} has {size} bytes, but its {sequences} sequences and {documents} document entries take "
            f"{payload} (or {payload + sequences} with modes); the file is truncated or damaged: "
            "copy it again or preprocess again"
        )
    return DTYPES[code], sequences, documents


def require_files(prefix: str) -> tuple[Path | StorePath, Path | StorePath]:
    """Return the `.bin` and the `.idx` of a prefix. Raise DataError with the nearest names if one is missing."""
    bin_path, idx_path = file_pair(prefix)
    with _read_errors(prefix):
        missing = [str(path) for path in (idx_path, bin_path) if not path.is_file()]
    if not missing:
        return bin_path, idx_path
    folder, name = os.path.split(prefix)
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(path.name[:-4] for path in idx_path.parent.iterdir() if path.suffix == ".idx")
        names = [other for other in names if other != name]
    similar = [other for other in names if other.startswith(name)] or difflib.get_close_matches(name, names)
    if prefix.endswith((".bin", ".idx")):
        remedy = f"a data path is written without file extension: use {prefix[:-4]}"
    elif hint := file_hint(Path(prefix)) if isinstance(idx_path, Path) else "":
        remedy = f"{hint}; use the prefix that `megalith preprocess` wrote"
    elif similar:
        remedy = f"did you mean {' or '.join(os.path.join(folder, other) for other in similar[:3])}?"
    else:
        remedy = "check the path, or make the dataset with megalith preprocess"
    raise DataError(
        f"{' and '.join(missing)} not found, but a dataset consists of a .bin and an .idx file; {remedy}"
    )


def map_index(path: Path | StorePath) -> mmap.mmap | bytes:
    """Memory-map an `.idx` file. Returns b"" for an empty file, which cannot be mapped.

    An `.idx` in an object store is first downloaded to an unlinked temporary file, after its size has been checked
    against its header.
    """
    with _read_errors(path):
        if isinstance(path, Path):
            with FileIO(path) as file:
                return _map(file)
        size = path.size()
        read_header(path, path.read_range(0, HEADER.size), size)
        with tempfile.TemporaryDirectory() as folder:
            path.fetch(Path(folder, "idx"))
            with FileIO(Path(folder, "idx")) as file:
                return _map(file)


def _map(file: FileIO) -> mmap.mmap | bytes:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.fstat(file.fileno()).st_size else b""


class TokenFile:
    """A `.bin` file that several threads can read at the same time. Raises DataError if a read fails."""

    def __init__(self, path: Path | StorePath):
        self._path = path
        with _read_errors(path):
            if isinstance(path, StorePath):
                self.size, self._version = path.stat()
                self._read_part = self._read_cached_block
                return
            self.size = size_of(path)
            self._file = FileIO(path)
        self._read_part = lambda count, start: os.pread(self._file.fileno(), count, start)
        # Samples are read in random order, so read-ahead would waste megabytes per sample.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, start: int, count: int) -> bytes:
        """Return the bytes `[start, start + count)`."""
        parts = []
        while count:
            try:
                part = self._read_part(count, start)
            except OSError as error:
                raise DataError(
                    f"cannot read {self._path} at byte {start}: {error.strerror or error}; check its disk"
                    + " or its network" * is_url(self._path)
                ) from error
            if not part:
                raise DataError(
                    f"{self._path} ends before byte {start + count}, but had {self.size} bytes when it was opened; "
                    "it has been truncated since: copy it again or preprocess again"
                )
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_cached_block(self, count: int, start: int) -> bytes:
        at = start % BLOCK
        end = min(start - at + BLOCK, self.size)
        return _fetch(self._path, self._version, start - at, end)[at : at + count]


@lru_cache(CACHED_BLOCKS)  # shared by all datasets of a process
def _fetch(path: StorePath, version: str, start: int, end: int) -> bytes:
    return path.read_range(start, end)


@contextlib.contextmanager
def _read_errors(path: object) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        advice = (
            "the URL, its credentials and the network" if is_url(path) else "its permissions and its disk"
        )
        raise DataError(f"cannot read {path}: {error.strerror or error}; check {advice}") from error
