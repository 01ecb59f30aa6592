"""Blocks of documents and their parsed contents. One process reads the blocks, and another may parse them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megalith.data.inputs.hub_dataset import Source

MAX_DOCUMENT_BYTES = 32 << 20
"""Byte-pair encoding takes about 125 bytes of memory per byte of a document: 4 GB at this length."""


@dataclass(frozen=True)
class TextRecord:
    """The texts of one record, in the order of the requested keys.

    `line` is the number of the record's first line, or of its row; `offset` is its first byte, 0 for rows.
    """

    line: int
    offset: int
    texts: list[str]


@dataclass(frozen=True)
class BadLine:
    """A record without a usable document. `line` counts from 1. `offset` is its first byte, or None for table rows.

    `unit` is the unit that `line` counts: "line", "row" or "entry".
    """

    path: Source
    line: int
    offset: int | None
    reason: str
    unit: str = "line"

    def way_out(self, setting: str) -> str:
        """Return a clause that suggests another key for `setting` if the record has one, otherwise ""."""
        return f"set {setting} if the text has another key, " if self.reason.startswith(NO_KEY) else ""

    def __str__(self) -> str:
        byte = "" if self.offset is None else f" (byte {self.offset})"
        return f"{self.path} {self.unit} {self.line}{byte} is unusable: {self.reason}"


NO_KEY = "it has no key "


def no_key(key: str, keys: Iterable[str]) -> str:
    """Return the reason for an error about a record that lacks `key`. `keys` are the record's keys."""
    return f"{NO_KEY}{key!r} (its keys: {', '.join(map(repr, keys)) or 'none'})"


class DocumentBlock(Protocol):
    """Consecutive documents of a source, picklable."""

    path: Source
    position: int
    """Bytes of the (compressed) file read so far, for progress."""

    @property
    def num_bytes(self) -> int:
        """Uncompressed bytes."""

    def parse(
        self, json_keys: Sequence[str], max_document_bytes: int = MAX_DOCUMENT_BYTES
    ) -> tuple[list[TextRecord], list[BadLine]]:
        """Return the texts under `json_keys` and the unusable records, both in order."""


JSON_NAMES: dict[type, str] = {
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def type_name(value: Any) -> str:
    """Return JSON's name for the type of a value, or Python's if JSON has none."""
    return JSON_NAMES.get(type(value), type(value).__name__)


def check_size(content: bytes | str, max_document_bytes: int, noun: str = "it") -> None:
    """Raise ValueError if a document is longer than the limit."""
    if len(content) > max_document_bytes:
        raise ValueError(
            f"{noun} is longer than the limit of {max_document_bytes} bytes; cut the document into parts, or raise "
            "max_line_bytes if about 125 bytes of memory per byte are free"
        )


def undecodable(
    path: Source, content: bytes, error: UnicodeDecodeError, line: int = 1, offset: int = 0
) -> BadLine:
    """Return a BadLine for the line of `content` with the first byte that is not UTF-8.

    `line` and `offset` are the number and the first byte of the content's first line.
    """
    start = content.rfind(b"\n", 0, error.start) + 1
    end = max(content.find(b"\n", error.start), error.end)
    in_line = UnicodeDecodeError(
        "utf-8", content[start:end], error.start - start, error.end - start, error.reason
    )
    number = line + content.count(b"\n", 0, start)
    return BadLine(path, number, offset + start, reason_of(in_line))


BYTE_ORDER_MARK = "\ufeff"
UTF16_MARKS = b"\xff\xfe", b"\xfe\xff"
SAMPLE = 64  # bytes that show the encoding


def utf16_hint(content: bytes) -> str:
    """Return a clause about UTF-16 and its conversion if the content starts like UTF-16, otherwise "".

    Content without a byte-order mark counts as UTF-16 if every second one of its first bytes is 0, but not all of them.
    """
    start = content[:SAMPLE]
    name = "utf-16" if start[:2] in UTF16_MARKS else None
    if name is None and len(start) >= 8 and any(start):
        name = "utf-16le" if not any(start[1::2]) else "utf-16be" if not any(start[::2]) else None
    return f"; the file is UTF-16: convert it with iconv -f {name} -t utf-8" if name else ""


def reason_of(error: ValueError | RecursionError, of: str = "line") -> str:
    """Return the reason for a parsing error, to be appended to a sentence. Positions are counted within the unit `of`,
    such as a line.
    """
    if isinstance(error, UnicodeDecodeError):
        reason = (
            f"not UTF-8: byte {error.object[error.start]:#04x} at {error.start} of the {of} ({error.reason})"
        )
        return f"{reason}{utf16_hint(error.object)}"
    if isinstance(error, UnicodeEncodeError):
        return "it has an unpaired surrogate; correct its JSON escape"
    if isinstance(error, json.JSONDecodeError):
        if error.doc.startswith(BYTE_ORDER_MARK):
            return "it begins with a byte-order mark, which only the first line of a file may have"
        if error.doc and not error.doc.strip("\0"):
            return "it consists of zero bytes"
        return f"not JSON: {error.msg} at character {error.pos} of the {of}{utf16_hint(error.doc[:SAMPLE].encode())}"
    if isinstance(error, RecursionError):
        return "its JSON is nested too deeply"
    return str(error)
