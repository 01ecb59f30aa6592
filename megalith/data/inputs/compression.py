"""Reads files in chunks, and decompresses `.gz` and `.zst` files."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import BinaryIO

import zstandard

from megalith.errors import DataError
from megalith.remote import StorePath

COMPRESSED = (".gz", ".zst")
_ZSTD_PIECE_BYTES = 1 << 13  # small, because zstd may expand data 30,000 times


def content_suffix(path: Path | StorePath) -> str:
    """Return the extension of a file's content in lower case: `.jsonl` for `a.jsonl.gz`."""
    name = PurePath(path.name)
    return PurePath(name.stem).suffix.lower() if name.suffix in COMPRESSED else name.suffix.lower()


def read_pieces(path: Path | StorePath, size: int) -> Iterator[tuple[bytes, int]]:
    """Yield the uncompressed content in chunks of about `size` bytes, each with its position in the compressed file.

    Raises:
        DataError: the file cannot be read, or is damaged or truncated.
    """
    count = 0
    try:
        with path.open("rb") as file:
            if path.suffix == ".zst":
                pieces = _decompress_zstd(file, size)
            elif path.suffix == ".gz":
                pieces = iter(lambda: unzipped.read(size), b"")
                unzipped = gzip.GzipFile(fileobj=file)
            else:
                pieces = iter(lambda: file.read(size), b"")
            for piece in pieces:
                count += len(piece)
                yield piece, file.tell()
            if path.suffix in COMPRESSED and file.tell() == 0:
                raise EOFError("it is empty")
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise DataError(
            f"{path} is not a complete {path.suffix} file ({error}; {count:,} bytes of its content were read); it is "
            "damaged or truncated: copy it again"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; check the file") from error


def _decompress_zstd(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield the content of all frames. The library's stream reader would accept a truncated file."""
    library = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = None
    content = bytearray()
    while piece := file.read(_ZSTD_PIECE_BYTES):
        while piece:
            frame = frame or library.decompressobj()
            content += frame.decompress(piece)
            piece, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        while len(content) >= size:
            yield bytes(content[:size])
            del content[:size]
    if frame is not None:
        raise EOFError("it ends within a frame")
    if content:
        yield bytes(content)
