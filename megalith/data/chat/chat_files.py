"""Files of chat data: JSON Lines, JSON arrays, parquet, and folders that `datasets` saved."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megalith.data.blend import DataPath, parse_data_path
from megalith.data.chat.conversations import Record
from megalith.data.doors import of_dataset
from megalith.data.preprocessing.jsonl import expand_inputs, read_objects
from megalith.errors import ConfigError, DataError
from megalith.remote import StorePath, open_location


def chat_files(path: DataPath) -> list[Path | StorePath]:
    """The files and saved datasets that a data path names, globs among them. ConfigError: weights."""
    prefixes, weights = parse_data_path(path)
    if weights is not None:
        raise ConfigError(
            f"data_path {path!r} has weights, which chat data does not take; name files alone, a file twice to "
            "have its samples twice as often"
        )
    files: list[Path | StorePath] = []
    for prefix in prefixes:
        if found := of_dataset(prefix):
            raise ConfigError(found)
        files += [Path(prefix)] if Path(prefix).is_dir() else expand_inputs([prefix])
    return files


def read_records(path: Path | StorePath) -> Iterator[tuple[str, Record]]:
    """Each record with where it stands in the file: "line 3", "row 3", "entry 3", counted from 1.

    DataError: a file that cannot be read, or a line that is not a JSON object. ConfigError: a missing package.
    """
    if isinstance(path, Path) and path.is_dir():
        yield from _numbered("row", _saved_dataset(path))
    elif path.suffix == ".parquet":
        yield from _numbered("row", _parquet(path))
    elif path.suffix == ".json" and (entries := _whole_json(path)) is not None:
        yield from _numbered("entry", entries)
    else:
        for line, record in read_objects(path):
            yield f"line {line}", record


def _numbered(what: str, records: Any) -> Iterator[tuple[str, Record]]:
    for number, record in enumerate(records, 1):
        yield f"{what} {number}", record


def _saved_dataset(path: Path) -> Iterator[Record]:
    datasets = _package("datasets", path)
    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:  # the library has no kind of its own
        raise DataError(f"{path} is not a dataset that `save_to_disk` wrote ({error})") from error
    if isinstance(found, Mapping):
        raise ConfigError(
            f"{path} holds the splits {', '.join(found)}; name their folders as data.train_data_path and its kin"
        )
    yield from found


def _parquet(path: Path | StorePath) -> Iterator[Record]:
    parquet = _package("pyarrow.parquet", path)
    try:
        with path.open("rb") as file:
            for batch in parquet.ParquetFile(file).iter_batches():
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own are kinds of these
        raise DataError(
            f"{path} cannot be read as parquet ({error}); it is damaged or another kind of file"
        ) from error


def _package(name: str, path: Path | StorePath) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{path} takes the {name.partition('.')[0]} package, which is not installed; run: "
            "pip install 'megalith[hf]', or give JSONL"
        ) from error


def _whole_json(path: Path | StorePath) -> list[Record] | None:
    """The entries of a file that is one JSON array; None: it is JSON Lines."""
    try:
        with open_location(str(path)).open("rb") as file:
            if file.read(1) != b"[":
                return None
        with open_location(str(path)).open("rb") as file:
            entries = json.loads(file.read().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}); correct the file") from error
    if bad := next((n for n, entry in enumerate(entries, 1) if not isinstance(entry, dict)), None):
        raise DataError(f"{path} entry {bad} is not an object; correct or remove it")
    return entries
