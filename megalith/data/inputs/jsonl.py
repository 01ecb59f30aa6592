"""Reading of JSON Lines, plain or compressed, in blocks of complete lines.

Reading and parsing are separate, so that worker processes can parse. An unusable line is a `BadLine` with file, line,
byte offset (in the uncompressed text) and reason.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalith.data.inputs.blocks import (
    MAX_DOCUMENT_BYTES,
    BadLine,
    TextRecord,
    check_size,
    no_key,
    reason_of,
    type_name,
)
from megalith.data.inputs.compression import content_suffix, read_pieces
from megalith.errors import DataError
from megalith.remote import StorePath

BLOCK_BYTES = 1 << 18
MAX_LINE_BYTES = MAX_DOCUMENT_BYTES


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

    @property
    def num_bytes(self) -> int:
        return len(self.data) + 1

    def parse(
        self, json_keys: Sequence[str], max_line_bytes: int = MAX_LINE_BYTES
    ) -> tuple[list[TextRecord], list[BadLine]]:
        """Return the block's documents and its unusable lines, in order, without blank lines."""
        records, bad_lines = [], []
        offset = self.offset
        for number, line in enumerate(self.data.split(b"\n"), self.first_line):
            if line and not line.isspace():
                try:
                    content = line.removeprefix(codecs.BOM_UTF8) if offset == 0 else line
                    records.append(
                        TextRecord(number, offset, _parse_line(content, json_keys, max_line_bytes))
                    )
                except (ValueError, RecursionError) as error:
                    reason = reason_of(error) + _other_format_hint(self.path)
                    bad_lines.append(BadLine(self.path, number, offset, reason))
            offset += len(line) + 1
        return records, bad_lines


def read_blocks(
    path: Path | StorePath, max_line_bytes: int = MAX_LINE_BYTES, block_bytes: int = BLOCK_BYTES
) -> Iterator[LineBlock]:
    """Yield the file in blocks of complete lines of about `block_bytes`.

    A line longer than `max_line_bytes` is truncated to `max_line_bytes + 1` bytes, so that it does not fill the
    memory, and gets a block of its own, which `LineBlock.parse` rejects. Raise DataError if the file cannot be read,
    or is damaged or truncated.
    """
    line, offset, position = 1, 0, 0
    tail = bytearray()  # the incomplete last line
    dropping = False  # inside the rest of a line that is too long
    for piece, position in read_pieces(path, block_bytes):
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
                    bad = BadLine(path, number, offset, reason_of(error) + _other_format_hint(path))
                    raise DataError(f"{bad}; correct or remove the line") from error
            offset += len(line) + 1


OTHER_FORMATS = (
    ".md", ".rst", ".csv", ".tsv", ".html", ".xml", ".pdf", ".doc", ".docx", ".odt", ".epub", ".xlsx",
)  # fmt: skip
ARCHIVES = (".zip", ".tar", ".tgz", ".bz2", ".xz", ".7z", ".rar")


def _other_format_hint(path: Path | StorePath) -> str:
    """Return advice if the file extension names an unsupported format, otherwise ""."""
    ending = content_suffix(path)
    if ending in ARCHIVES:
        return f" ({ending} files are not supported: extract the files, or compress them with gzip or zstd)"
    if ending not in OTHER_FORMATS:
        return ""
    return f' ({ending} files are not supported: write JSON Lines, one {{"text": "…"}} per document, or .txt files)'


def _parse_object(line: bytes, max_line_bytes: int) -> dict[str, Any]:
    """Parse a line as a JSON object. Raises ValueError with the reason, also for JSON and Unicode errors."""
    check_size(line, max_line_bytes)
    content = json.loads(line.decode("utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"it holds {type_name(content)}, not a JSON object")
    return content


def _parse_line(line: bytes, json_keys: Sequence[str], max_line_bytes: int) -> list[str]:
    """Return the strings under `json_keys`. Raise ValueError with the reason."""
    content = _parse_object(line, max_line_bytes)
    texts = []
    for key in json_keys:
        if key not in content:
            raise ValueError(no_key(key, content))
        text = content[key]
        if not isinstance(text, str):
            raise ValueError(f"its {key!r} is {type_name(text)}, not a string")
        if b"\\u" in line:
            text.encode("utf-8")  # an escape may spell half a surrogate pair, which no encoding accepts
        texts.append(text)
    return texts
