"""Files of chat data: JSON Lines, JSON arrays, Parquet, and folders saved by `datasets`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megalith.data.blend import DataPath, parse_data_path
from megalith.data.chat.conversations import Record
from megalith.data.input_hints import dataset_hint
from megalith.data.preprocessing.jsonl import expand_inputs, read_objects
from megalith.errors import ConfigError, DataError
from megalith.remote import StorePath, open_location


def chat_files(path: DataPath) -> list[Path | StorePath]:
    """Return the files and saved datasets of a data path, with globs expanded. Raise ConfigError for weights."""
    prefixes, weights = parse_data_path(path)
    if weights is not None:
        raise ConfigError(
            f"data_path {path!r} has weights, which chat data does not support; name files only, and a "
            "file twice to use its samples twice as often"
        )
    files: list[Path | StorePath] = []
    for prefix in prefixes:
        if hint := dataset_hint(prefix):
            raise ConfigError(hint)
        files += [Path(prefix)] if Path(prefix).is_dir() else expand_inputs([prefix])
    return files


def read_records(path: Path | StorePath) -> Iterator[tuple[str, Record]]:
    """Yield each record with its position in the file: "line 3", "row 3" or "entry 3", counted from 1.

    Raises:
        DataError: if the file cannot be read, or a line is not a JSON object.
        ConfigError: if a package is missing.
    """
    if isinstance(path, Path) and path.is_dir():
        yield from _numbered("row", _saved_dataset(path))
    elif path.suffix == ".parquet":
        yield from _numbered("row", _parquet(path))
    elif path.suffix == ".json" and (entries := _json_array(path)) is not None:
        yield from _numbered("entry", entries)
    else:
        for line, record in read_objects(path):
            yield f"line {line}", record


def _numbered(unit: str, records: Any) -> Iterator[tuple[str, Record]]:
    for number, record in enumerate(records, 1):
        yield f"{unit} {number}", record


def _saved_dataset(path: Path) -> Iterator[Record]:
    datasets = _package("datasets", path)
    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:  # the library has no error class of its own
        raise DataError(f"{path} is not a dataset that `save_to_disk` wrote ({error})") from error
    if isinstance(dataset, Mapping):
        raise ConfigError(
            f"{path} has the splits {', '.join(dataset)}; set data.train_data_path and data.valid_data_path to their "
            "folders"
        )
    yield from dataset


def _parquet(path: Path | StorePath) -> Iterator[Record]:
    parquet = _package("pyarrow.parquet", path)
    try:
        with path.open("rb") as file:
            for batch in parquet.ParquetFile(file).iter_batches():
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors are subclasses
        raise DataError(
            f"{path} cannot be read as parquet ({error}); it is damaged or another kind of file"
        ) from error


def _package(name: str, path: Path | StorePath) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{path} needs the {name.partition('.')[0]} package, which is not installed; run: "
            "pip install 'megalith[hf]', or give JSONL"
        ) from error


def _json_array(path: Path | StorePath) -> list[Record] | None:
    """Return the entries of a file that is a JSON array; None if it is JSON Lines."""
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
