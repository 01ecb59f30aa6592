"""Reads text and records: turns input names into sources, and sources into blocks of documents, texts or records.

| source | documents |
|---|---|
| `.jsonl`, `.json`, or another ending | one per line, or per entry of a JSON array, under a key |
| `.txt` | one per file, or per block of lines between blank lines (`TextDocuments`) |
| `.parquet`, `.arrow`, a folder saved by `datasets` | one per row, in a column |
| `hf://NAME` | one per row of a dataset of the hub, also as a stream |

Files other than tables may also end in `.gz` or `.zst`. Files may be in an object store. A folder means all files below
it with one of these endings, and a glob all its matches, sorted by name.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from megalith.config.data import TextDocuments
from megalith.data.inputs.blocks import MAX_DOCUMENT_BYTES, DocumentBlock
from megalith.data.inputs.compression import content_suffix
from megalith.data.inputs.hub_dataset import SCHEME, HubDataset, Source
from megalith.data.inputs.jsonl import read_blocks, read_objects
from megalith.data.inputs.plain_text import read_text_blocks
from megalith.data.inputs.row_tables import (
    is_saved_dataset,
    json_array,
    read_array_blocks,
    read_arrow_blocks,
    read_rows,
)
from megalith.data.inputs.source_versions import steady
from megalith.errors import ConfigError, DataError, shorten
from megalith.remote import StorePath, open_location
from megalith.tables import counted

TABLES = (".parquet", ".arrow")
ENDINGS = (".jsonl", ".json", ".ndjson", ".txt", *TABLES)
"""Endings of files that are read from a folder, also followed by `.gz` or `.zst`."""
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "dev", "val"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Words in the names of a dataset's files → split, as in `datasets`."""
SPLIT_WORD = re.compile(rf"(?<![a-z])({'|'.join(SPLITS)})(?![a-z])")


def expand_inputs(inputs: Sequence[str | Path | Source], notes: list[str] | None = None) -> list[Source]:
    """Return the sources of `inputs`, in order, with folders and globs expanded and sorted.

    Args:
        inputs: files, folders, globs and URLs.
        notes: receives a sentence about the files of each folder that are not read.

    Raises:
        DataError: an input does not exist, a folder has no file to read, or a file is named twice.
    """
    sources: list[Source] = []
    for pattern in inputs:
        try:
            matches = {pattern: True} if isinstance(pattern, HubDataset) else _matches(str(pattern))
        except OSError as error:
            raise DataError(
                f"cannot look for {str(pattern)!r}: {error.strerror or error}; check the path"
            ) from None
        if not matches:
            raise DataError(f"no file matches the input {str(pattern)!r}; check the path")
        for match, is_source in matches.items():
            sources += [match] if is_source else _files_of(match, [] if notes is None else notes)
    if not sources:
        raise DataError("there is no input file; pass at least one, such as text.jsonl")
    seen: set[Source] = set()
    for source in sources:
        if source in seen:
            raise DataError(
                f"the input {str(source)!r} is listed twice, which would repeat its documents; list it once"
            )
        seen.add(source)
    return sources


def read_document_blocks(
    source: Source,
    json_keys: Sequence[str],
    text_documents: TextDocuments = "file",
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
) -> Iterator[DocumentBlock]:
    """Return the documents of a source in blocks.

    Args:
        source: an element of `expand_inputs`.
        json_keys: keys or columns of the texts. A `.txt` file needs exactly one, whose name is ignored.
        text_documents: the documents of a `.txt` file.
        max_document_bytes: maximum length of a document, or of a line of JSON Lines.

    Raises:
        DataError: from the iterator, if the source cannot be read.
        ConfigError: for a `.txt` file with several keys, or if a package is missing.
    """
    suffix = _suffix(source)
    if suffix == ".txt":
        if len(json_keys) > 1:
            raise ConfigError(
                f"{source} is a .txt file, whose documents have one text each, but {len(json_keys)} keys are set "
                f"({', '.join(json_keys)}); set only one, whose name does not matter"
            )
        return read_text_blocks(source, text_documents, max_document_bytes)
    if suffix in TABLES or suffix == "":
        return read_arrow_blocks(source, suffix, json_keys)
    if suffix == ".json" and (blocks := read_array_blocks(source, json_keys)) is not None:
        return blocks
    return read_blocks(source, max_document_bytes)


def read_texts(
    source: Source,
    json_keys: Sequence[str],
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    text_documents: TextDocuments = "file",
) -> Iterator[str]:
    """Yield every text of a source, key by key within a record. Raise DataError at the first unusable one."""
    blocks = read_document_blocks(source, json_keys, text_documents, max_document_bytes)
    for block in steady(source, blocks):
        records, bad_lines = block.parse(json_keys, max_document_bytes)
        if bad_lines:
            raise DataError(f"{bad_lines[0]}; correct or remove it")
        for record in records:
            yield from record.texts


def read_records(
    source: Source, text_documents: TextDocuments = "file"
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each record with its position in the source: "line 3", "row 3" or "entry 3", counted from 1.

    A document of a `.txt` file is a record `{"text": …}`.

    Raises:
        DataError: the source cannot be read or changes meanwhile, or a line is not a JSON object.
        ConfigError: a package is missing.
    """
    return steady(source, _records(source, text_documents))


def _records(source: Source, text_documents: TextDocuments) -> Iterator[tuple[str, Mapping[str, Any]]]:
    suffix = _suffix(source)
    if suffix == ".txt":
        for block in read_text_blocks(source, text_documents):
            records, bad_lines = block.parse(["text"])
            if bad_lines:
                raise DataError(f"{bad_lines[0]}; correct or remove it")
            for record in records:
                yield f"line {record.line}", {"text": record.texts[0]}
    elif suffix in TABLES or suffix == "":
        yield from _numbered("row", read_rows(source, suffix))
    elif suffix == ".json" and (entries := json_array(source)) is not None:
        yield from _numbered("entry", entries)
    else:
        for line, record in read_objects(source):
            yield f"line {line}", record


def _numbered(
    unit: str, records: Iterator[Mapping[str, Any]] | list[dict[str, Any]]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, record in enumerate(records, 1):
        yield f"{unit} {number}", record


def _suffix(source: Source) -> str:
    """Return the ending of the content: "" for datasets, `.jsonl` for files with an unfamiliar ending."""
    if isinstance(source, HubDataset) or (isinstance(source, Path) and source.is_dir()):
        return ""
    return content_suffix(source) if content_suffix(source) in ENDINGS else ".jsonl"


def _matches(pattern: str) -> dict[Source, bool]:
    """Return the sources that match an input's name. The value is False for a folder of several files,
    otherwise True.
    """
    if pattern.startswith(SCHEME):
        return {HubDataset(pattern): True}
    path = open_location(pattern)
    if isinstance(path, StorePath):
        kind = path.kind()
        kinds = path.glob() if kind is None else {path: kind}
        return {match: kind == "file" for match, kind in kinds.items()}
    paths = [path] if path.exists() else map(Path, sorted(glob.glob(pattern, recursive=True)))
    return {path: path.is_file() or is_saved_dataset(path) for path in paths}


def _check_splits(folder: Path | StorePath, files: Sequence[Source]) -> None:
    """Raise DataError if the names of files put them into several splits, by the rules of `datasets`."""
    first: dict[str, Source] = {}
    for file in files:
        if words := SPLIT_WORD.findall(str(file).removeprefix(str(folder)).lower()):
            first.setdefault(SPLITS[words[-1]], file)
    if len(first) > 1:
        raise DataError(
            f"the folder {folder} has files of the splits {', '.join(sorted(first))}, which would be mixed; name the "
            f"files of one, such as {first.get('train', next(iter(first.values())))}"
        )


def _files_of(source: Path | StorePath, notes: list[str]) -> list[Source]:
    """Return the files below a folder, sorted by name."""
    if isinstance(source, Path) and not source.is_dir():
        raise DataError(f"the input {str(source)!r} is neither a file nor a folder; check the path")
    if isinstance(source, StorePath):
        names = sorted(source.sizes())
    else:
        names = sorted(path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file())
    names = [name for name in names if not any(part.startswith(".") for part in PurePath(name).parts)]
    files: list[Source] = []
    others: list[str] = []
    for name in names:
        path = source / name
        files.append(path) if content_suffix(path) in ENDINGS else others.append(name)
    if not files:
        present = f" (it has {shorten(others)})" if others else ""
        raise DataError(
            f"the folder {source} has no file that ends in {', '.join(ENDINGS)}{present}; pass its files"
        )
    _check_splits(source, files)
    if others:
        notes.append(f"{source}: {counted(len(others), 'file')} of another kind not read: {shorten(others)}")
    return files
