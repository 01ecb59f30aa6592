"""Reads `.txt` files, plain or compressed. A document is a file, or a block of lines between blank lines."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalith.config.data import TextDocuments
from megalith.data.inputs.blocks import (
    MAX_DOCUMENT_BYTES,
    BadLine,
    TextRecord,
    check_size,
    undecodable,
    utf16_hint,
)
from megalith.data.inputs.compression import read_pieces
from megalith.data.inputs.jsonl import BLOCK_BYTES, read_blocks
from megalith.remote import StorePath

MARK = len(codecs.BOM_UTF8)
SPACES = b" \t\r\f\v\n"
BLANK_LINES = re.compile(rb"\n(?:[ \t\r\f\v]*\n)+")
LEADING_BLANK_LINES = re.compile(rb"(?:[ \t\r\f\v]*\n)+")
RawDocument = tuple[int, int, bytes]  # number of its first line, its byte offset, its content


@dataclass(frozen=True)
class TextFileBlock:
    """Documents of a `.txt` file as bytes. `position` is the number of bytes read from the file so far."""

    path: Path | StorePath
    documents: list[RawDocument]
    position: int

    @property
    def num_bytes(self) -> int:
        return sum(len(content) + 1 for _, _, content in self.documents)

    def parse(
        self, json_keys: Sequence[str], max_document_bytes: int = MAX_DOCUMENT_BYTES
    ) -> tuple[list[TextRecord], list[BadLine]]:
        """Return the usable documents, and the documents that are too long or not UTF-8. `json_keys` must have one key,
        whose name is ignored."""
        records, bad_lines = [], []
        for line, offset, content in self.documents:
            try:
                check_size(content, max_document_bytes)
                text = content.decode("utf-8")
                if hint := utf16_hint(content):
                    raise ValueError(f"every second byte is 0{hint}")
                records.append(TextRecord(line, offset, [text]))
            except UnicodeDecodeError as error:
                bad_lines.append(undecodable(self.path, content, error, line, offset))
            except ValueError as error:
                bad_lines.append(BadLine(self.path, line, offset, str(error)))
        return records, bad_lines


def read_text_blocks(
    path: Path | StorePath,
    documents: TextDocuments,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[TextFileBlock]:
    """Yield the documents of a file in blocks of about `block_bytes`.

    A document is the file's content (`file`; also an empty one), or the lines between blank lines without the last
    line end (`block`). A byte-order mark at the start is removed. A document longer than `max_document_bytes` is
    truncated to `max_document_bytes + 1` bytes, so that `parse` rejects it.

    Raises:
        DataError: the file cannot be read, or is damaged or truncated.
    """
    if documents == "file":
        content, end = bytearray(), 0
        for piece, position in read_pieces(path, block_bytes):
            end = position
            content += piece[: max(0, max_document_bytes + MARK + 1 - len(content))]
        yield TextFileBlock(path, [_without_mark(1, 0, bytes(content))], end)
        return
    gathered: list[RawDocument] = []
    num_bytes = position = 0
    for document, position in _blocks_of_lines(path, max_document_bytes, block_bytes):
        gathered.append(document)
        num_bytes += len(document[2])
        if num_bytes >= block_bytes:
            yield TextFileBlock(path, gathered, position)
            gathered, num_bytes = [], 0
    if gathered:
        yield TextFileBlock(path, gathered, position)


def _blocks_of_lines(
    path: Path | StorePath, max_document_bytes: int, block_bytes: int
) -> Iterator[tuple[RawDocument, int]]:
    """Yield the documents between blank lines, each with the position in the file."""
    text, position = b"", 0  # the unfinished document, bytes of the file
    line, offset = 1, 0  # of the first byte of `text`
    is_too_long = False  # lines up to the next blank one belong to a document that has been yielded
    for block in read_blocks(path, max_document_bytes + MARK, block_bytes):
        data, position, searched = block.data, block.position, len(text.rstrip(SPACES))
        if not text:
            line, offset = block.first_line, block.offset
            if is_too_long:
                lines = data.split(b"\n")
                blank = next((k for k, each in enumerate(lines) if not each.strip()), None)
                if blank is None:
                    continue
                skipped = b"\n".join(lines[: blank + 1])
                line, offset, is_too_long = line + blank + 1, offset + len(skipped) + 1, False
                data = data[len(skipped) + 1 :]
        text = text + b"\n" + data if text else data
        start = 0
        for match in BLANK_LINES.finditer(text, searched):
            document = _raw_document(text[start : match.start()], line, offset + start)
            if document[2].strip():
                yield document, position
            line += text.count(b"\n", start, match.end())
            start = match.end()
        line, offset, text = _without_blank_start(line, offset + start, text[start:])
        if not text[text.rfind(b"\n") + 1 :].strip():  # the last line is blank, so the document is complete
            if text:
                yield _raw_document(_without_blank_end(text), line, offset), position
            text = b""
        if len(text) > max_document_bytes:
            yield (line, offset, text[: max_document_bytes + 1]), position
            text, is_too_long = b"", True
    if text:
        yield _raw_document(text, line, offset), position


def _raw_document(content: bytes, line: int, offset: int) -> RawDocument:
    line, offset, content = _without_blank_start(line, offset, content)
    return line, offset, content.removesuffix(b"\r")


def _without_blank_end(text: bytes) -> bytes:
    """Return text without the blank lines at its end."""
    end = text.find(b"\n", len(text.rstrip(SPACES)))
    return text if end < 0 else text[:end]


def _without_blank_start(line: int, offset: int, content: bytes) -> RawDocument:
    """Return content from the start of a line without a byte-order mark and blank lines at its start."""
    if offset == 0:
        line, offset, content = _without_mark(line, offset, content)
    if blank := LEADING_BLANK_LINES.match(content):
        line, offset, content = line + blank[0].count(b"\n"), offset + blank.end(), content[blank.end() :]
    return line, offset, content if content.strip() else b""


def _without_mark(line: int, offset: int, content: bytes) -> RawDocument:
    mark = MARK if content.startswith(codecs.BOM_UTF8) else 0
    return line, offset + mark, content[mark:]
