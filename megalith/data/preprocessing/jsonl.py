"""Reading of JSON Lines, plain or compressed, in blocks of complete lines.

Reading and parsing are separate, so that worker processes can parse. An unusable line is a `BadLine` with file, line,
byte offset (in the uncompressed text) and reason.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from megalith.errors import DataError
from megalith.remote import StorePath, open_location

BLOCK_BYTES = 1 << 18
MAX_LINE_BYTES = 32 << 20
"""Byte-pair encoding takes about 125 bytes of memory per byte of a document: 4 GB at this length."""

_ZSTD_PIECE_BYTES = 1 << 13  # small, because zstd may expand data 30,000 times


@dataclass(frozen=True)
class LineBlock:
    """Complete lines of a file without the last newline, with the number (from 1) and byte offset of the first.

    `position` is the number of bytes of the (compressed) file read so far.
    """

    path: Path | StorePath
    first_line: int
    offset: int
    data: bytes
    position: int


@dataclass(frozen=True)
class BadLine:
    """A line without a usable document. `line` counts from 1; `offset` is the line's first byte."""

    path: Path | StorePath
    line: int
    offset: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path} line {self.line} (byte {self.offset}) is unusable: {self.reason}"


@dataclass(frozen=True)
class TextRecord:
    """The texts of one line, in the order of the requested keys."""

    line: int
    offset: int
    texts: list[str]


def expand_inputs(inputs: Sequence[str | Path]) -> list[Path | StorePath]:
    """Return the files and URLs of `inputs`, in order, with globs expanded and sorted. Raise DataError for missing
    files or duplicates."""
    paths: list[Path | StorePath] = []
    for pattern in map(str, inputs):
        try:
            matches = _matches(pattern)
        except OSError as error:
            raise DataError(
                f"cannot look for {pattern!r}: {error.strerror or error}; check the path"
            ) from None
        if not matches:
            raise DataError(f"no file matches the input {pattern!r}; check the path")
        paths += matches
    if not paths:
        raise DataError("no input; name at least one JSONL file")
    seen: set[Path] = set()
    for path in paths:
        if not path.is_file():
            raise DataError(f"the input {str(path)!r} is not a file; name its files, e.g. '{path}/*.jsonl'")
        if path in seen:
            raise DataError(f"the input {str(path)!r} is named twice; its documents would be repeated")
        seen.add(path)
    return paths


def _matches(pattern: str) -> list[Path | StorePath]:
    path = open_location(pattern)
    if path.exists():
        return [path]
    return (
        path.glob()
        if isinstance(path, StorePath)
        else [*map(Path, sorted(glob.glob(pattern, recursive=True)))]
    )


def read_blocks(
    path: Path | StorePath, max_line_bytes: int = MAX_LINE_BYTES, block_bytes: int = BLOCK_BYTES
) -> Iterator[LineBlock]:
    """Yield the file in blocks of complete lines of about `block_bytes`.

    A line longer than `max_line_bytes` is truncated to one byte more, in a block of its own: `parse_block` rejects
    it, and the rest never fills the memory. Raise DataError if the file cannot be read, or is damaged or truncated.
    """
    line, offset, position = 1, 0, 0
    tail = bytearray()  # the incomplete last line
    dropping = False  # inside the rest of a line that is too long
    for piece, position in _pieces(path, block_bytes):
        if dropping:
            end = piece.find(b"\n")
            if end < 0:
                offset += len(piece)
                continue
            offset, line, piece, dropping = offset + end + 1, line + 1, piece[end + 1 :], False
        end = piece.rfind(b"\n")
        if end >= 0:
            data = bytes(tail + piece[:end])
            yield LineBlock(path, line, offset, data, position)
            offset, line = offset + len(data) + 1, line + data.count(b"\n") + 1
            tail = bytearray(piece[end + 1 :])
        else:
            tail += piece
        if len(tail) > max_line_bytes:
            yield LineBlock(path, line, offset, bytes(tail[: max_line_bytes + 1]), position)
            offset, dropping = offset + len(tail), True
            tail.clear()
    if tail:
        yield LineBlock(path, line, offset, bytes(tail), position)


def parse_block(
    block: LineBlock, json_keys: Sequence[str], max_line_bytes: int = MAX_LINE_BYTES
) -> tuple[list[TextRecord], list[BadLine]]:
    """Return the block's documents and its unusable lines, in order, without blank lines."""
    records, bad_lines = [], []
    offset = block.offset
    for number, line in enumerate(block.data.split(b"\n"), block.first_line):
        if line and not line.isspace():
            try:
                content = line.removeprefix(codecs.BOM_UTF8) if offset == 0 else line
                records.append(TextRecord(number, offset, _parse_line(content, json_keys, max_line_bytes)))
            except (ValueError, RecursionError) as error:
                bad_lines.append(
                    BadLine(block.path, number, offset, _reason(error) + _text_file_hint(block.path))
                )
        offset += len(line) + 1
    return records, bad_lines


def read_texts(
    path: Path | StorePath, json_keys: Sequence[str], max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[str]:
    """Yield every text of the file, key by key within a line. Raise DataError at the first bad line."""
    for block in read_blocks(path, max_line_bytes):
        records, bad_lines = parse_block(block, json_keys, max_line_bytes)
        if bad_lines:
            raise DataError(f"{bad_lines[0]}; correct or remove the line")
        for record in records:
            yield from record.texts


def read_objects(
    path: Path | StorePath, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield every line's number and object, except blank lines. Raise DataError at the first bad line."""
    for block in read_blocks(path, max_line_bytes):
        offset = block.offset
        for number, line in enumerate(block.data.split(b"\n"), block.first_line):
            if line and not line.isspace():
                try:
                    content = line.removeprefix(codecs.BOM_UTF8) if offset == 0 else line
                    yield number, _parse_object(content, max_line_bytes)
                except (ValueError, RecursionError) as error:
                    bad = BadLine(path, number, offset, _reason(error) + _text_file_hint(path))
                    raise DataError(f"{bad}; correct or remove the line") from error
            offset += len(line) + 1


PLAIN_TEXT = (".txt", ".md", ".csv", ".tsv", ".html", ".xml")


def _text_file_hint(path: Path | StorePath) -> str:
    """Return advice for a plain-text file, by its name's extension; "" for other extensions."""
    ending = os.path.splitext(str(path))[1].lower()
    if ending not in PLAIN_TEXT:
        return ""
    return f' ({ending} files are not supported: write JSON Lines, one {{"text": "…"}} per document)'


def _parse_object(line: bytes, max_line_bytes: int) -> dict[str, Any]:
    """Parse a line. Raise ValueError with the reason; JSON and Unicode errors are subclasses."""
    if len(line) > max_line_bytes:
        raise ValueError(
            f"it is longer than the limit of {max_line_bytes} bytes; cut the document into parts, or raise "
            "max_line_bytes if about 125 bytes of memory per byte are free"
        )
    content = json.loads(line.decode("utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"it holds {_JSON_NAMES[type(content)]}, not a JSON object")
    return content


def _parse_line(line: bytes, json_keys: Sequence[str], max_line_bytes: int) -> list[str]:
    """Return the strings under `json_keys`. Raise ValueError with the reason."""
    content = _parse_object(line, max_line_bytes)
    texts = []
    for key in json_keys:
        if key not in content:
            raise ValueError(f"it has no key {key!r} (its keys: {', '.join(map(repr, content)) or 'none'})")
        text = content[key]
        if not isinstance(text, str):
            raise ValueError(f"its {key!r} is {_JSON_NAMES[type(text)]}, not a string")
        if b"\\u" in line:
            text.encode("utf-8")  # an escape may spell half a surrogate pair, which no encoding accepts
        texts.append(text)
    return texts


_JSON_NAMES = {
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return (
            f"not UTF-8: byte {error.object[error.start]:#04x} at {error.start} of the line ({error.reason})"
        )
    if isinstance(error, UnicodeEncodeError):
        return "it escapes half of a surrogate pair, which is no character"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at character {error.pos} of the line"
    if isinstance(error, RecursionError):
        return "its JSON is nested too deeply"
    return str(error)


def _pieces(path: Path | StorePath, size: int) -> Iterator[tuple[bytes, int]]:
    """Yield the file's uncompressed content in pieces of about `size`, each with the position in the file itself."""
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
                yield piece, file.tell()
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise DataError(
            f"{path} is not a complete {path.suffix} file ({error}); it is damaged or truncated: copy it again"
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
