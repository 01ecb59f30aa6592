"""The layout of Megatron's `.idx`, and the mapping of both files into memory.

Little-endian: a header of 34 bytes and then plain arrays.

    b"MMIDIDX\\x00\\x00"   9 bytes
    version = 1          uint64
    dtype code           uint8       (DTYPES below)
    S, sequences         uint64
    D, document entries  uint64      (one more than there are documents)
    sequence lengths     int32[S]    in tokens
    sequence offsets     int64[S]    in bytes into the .bin
    document indices     int64[D]    document d is the sequences [indices[d], indices[d + 1]); indices[0] = 0
    modes                int8[S]     optional; multimodal datasets only
"""

from __future__ import annotations

import difflib
import glob
import mmap
import os
import struct
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import numpy as np

from megalith.errors import DataError

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

CHUNK = 1 << 22  # elements treated at once: 100 million sequences then need no large temporaries


def file_pair(prefix: str | Path) -> tuple[Path, Path]:
    """The `.bin` and the `.idx` of a prefix."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def chunks(n: int) -> Iterator[slice]:
    """Slices of at most CHUNK elements that cover `range(n)`."""
    return (slice(start, min(start + CHUNK, n)) for start in range(0, n, CHUNK))


def read_header(path: Path, index: mmap.mmap | bytes) -> tuple[np.dtype, int, int]:
    """The token dtype, S and D of an `.idx` whose header and size hold; a DataError otherwise."""
    size = len(index)
    if size < HEADER.size:
        raise DataError(
            f"{path} has {size} bytes, but the header alone takes {HEADER.size}; "
            "the file was cut short: copy it again or preprocess again"
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
        known = ", ".join(f"{c} ({d})" for c, d in DTYPES.items())
        raise DataError(
            f"{path} has dtype code {code} at byte 17, but token ids are one of {known}; preprocess again"
        )
    payload = HEADER.size + 12 * sequences + 8 * documents
    if size not in (payload, payload + sequences):
        raise DataError(
            f"{path} has {size} bytes, but its {sequences} sequences and {documents} document entries take "
            f"{payload} (or {payload + sequences} with modes); the file is truncated or damaged: "
            "copy it again or preprocess again"
        )
    return DTYPES[code], sequences, documents


def require_files(prefix: str) -> tuple[Path, Path]:
    """The `.bin` and the `.idx` of a prefix, both there; a DataError with the nearest name otherwise."""
    bin_path, idx_path = file_pair(prefix)
    missing = [str(path) for path in (idx_path, bin_path) if not path.is_file()]
    if not missing:
        return bin_path, idx_path
    folder, name = os.path.split(prefix)
    there = sorted(path[:-4] for path in glob.glob("*.idx", root_dir=folder or None) if path != idx_path.name)
    near = [other for other in there if other.startswith(name)] or difflib.get_close_matches(name, there)
    if prefix.endswith((".bin", ".idx")):
        way_out = f"a data path has no ending: write {prefix[:-4]}"
    elif near:
        way_out = f"did you mean {' or '.join(os.path.join(folder, other) for other in near[:3])}?"
    else:
        way_out = "check the path, or make the dataset with megalith preprocess"
    raise DataError(f"{' and '.join(missing)} not found, but a dataset is a .bin and an .idx; {way_out}")


def map_file(path: Path) -> mmap.mmap | bytes:
    """The file's bytes, memory-mapped. An empty file, which cannot be mapped, is b""."""
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b""
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise _cannot_read(path, error) from error


def open_file(path: Path) -> FileIO:
    """The file, to be read without a buffer. DataError where it cannot be."""
    try:
        return FileIO(path)
    except OSError as error:
        raise _cannot_read(path, error) from error


def _cannot_read(path: Path, error: OSError) -> DataError:
    return DataError(f"cannot read {path}: {error.strerror}; check its permissions and its disk")
