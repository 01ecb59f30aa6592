"""Blocks of documents, which one process reads and another parses, and the results of parsing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megalith.data.inputs.hub_dataset import Source

MAX_DOCUMENT_BYTES = 32 << 20
"""Byte-pair encoding takes about 125 bytes of memory per byte of a document: 4 GB at this length."""


@dataclass(frozen=True)
class TextRecord:
    """The texts of one record, in the order of the requested keys.

    `line` is the number of its first line, or of its row; `offset` is its first byte, 0 for rows.
    """

    line: int
    offset: int
    texts: list[str]


@dataclass(frozen=True)
class BadLine:
    """A record without a usable document. `line` counts from 1; `offset` is its first byte, None for rows.

    `unit` is the unit that `line` counts: "line", "row" or "entry".
    """

    path: Source
    line: int
    offset: int | None
    reason: str
    unit: str = "line"

    def __str__(self) -> str:
        byte = "" if self.offset is None else f" (byte {self.offset})"
        return f"{self.path} {self.unit} {self.line}{byte} is unusable: {self.reason}"


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


def reason_of(error: ValueError | RecursionError) -> str:
    """Return the reason for a parsing error, worded to end a sentence."""
    if isinstance(error, UnicodeDecodeError):
        reason = (
            f"not UTF-8: byte {error.object[error.start]:#04x} at {error.start} of the line ({error.reason})"
        )
        utf16 = error.object[:2] in (b"\xff\xfe", b"\xfe\xff")
        return f"{reason}; the file is UTF-16: convert it with iconv -f utf-16 -t utf-8" if utf16 else reason
    if isinstance(error, UnicodeEncodeError):
        return "it escapes half of a surrogate pair, which is not a character"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at character {error.pos} of the line"
    if isinstance(error, RecursionError):
        return "its JSON is nested too deeply"
    return str(error)
