"""Reads tables: Parquet and Arrow files, JSON arrays, folders saved by `datasets`, and datasets of the hub.

Text columns are passed on as bytes, so that worker processes decode them.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    undecodable,
    utf16_hint,
)
from megalith.data.inputs.compression import COMPRESSED, read_pieces
from megalith.data.inputs.hub_dataset import HubDataset, Source
from megalith.data.inputs.packages import import_package
from megalith.errors import ConfigError, DataError, MegalithError
from megalith.remote import StorePath, size_of

ROWS = 256  # per block
SAVED_DATASET = "state.json"  # in a folder written by Dataset.save_to_disk
SAVED_SPLITS = "dataset_dict.json"  # by DatasetDict.save_to_disk
TEXT_TYPES = "is_string", "is_large_string", "is_string_view"  # of pyarrow.types; the last from version 16 on


END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # of Arrow's stream format


@dataclass(frozen=True)
class NoValue:
    """Placeholder for the value of a key that an entry lacks. `keys` are the keys that the entry has."""

    keys: tuple[str, ...]


@dataclass(frozen=True)
class RowBlock:
    """Rows of a table, with the values of each requested key.

    Strings are stored as UTF-8 bytes, other values unchanged.
    """

    path: Source
    unit: str
    first_row: int
    columns: list[list[Any]]
    position: int

    @property
    def num_bytes(self) -> int:
        return sum(
            len(value) for column in self.columns for value in column if isinstance(value, bytes | str)
        )

    def parse(
        self, json_keys: Sequence[str], max_document_bytes: int = MAX_DOCUMENT_BYTES
    ) -> tuple[list[TextRecord], list[BadLine]]:
        """Return the texts of the rows, and the rows with values that are not strings or are too long."""
        records, bad_lines = [], []
        for row, values in enumerate(zip(*self.columns), self.first_row):
            try:
                texts = [_text(key, value, max_document_bytes) for key, value in zip(json_keys, values)]
                records.append(TextRecord(row, 0, texts))
            except ValueError as error:
                bad_lines.append(BadLine(self.path, row, None, reason_of(error, "text"), self.unit))
        return records, bad_lines


def _text(key: str, value: Any, max_document_bytes: int) -> str:
    if isinstance(value, NoValue):
        raise ValueError(no_key(key, value.keys))
    if not isinstance(value, bytes | str):
        raise ValueError(f"its {key!r} is {type_name(value)}, not a string")
    check_size(value, max_document_bytes, f"its {key!r}")
    if isinstance(value, bytes):
        return value.decode("utf-8")
    value.encode("utf-8")  # an escape may spell half a surrogate pair, which no encoding accepts
    return value


def is_saved_dataset(path: Source) -> bool:
    """Return True for a folder that `save_to_disk` of `datasets` wrote."""
    return isinstance(path, Path) and any((path / name).is_file() for name in (SAVED_DATASET, SAVED_SPLITS))


def read_arrow_blocks(path: Source, suffix: str, json_keys: Sequence[str]) -> Iterator[RowBlock]:
    """Yield the columns `json_keys` of a Parquet or Arrow file, a saved dataset or a dataset of the hub.

    Raises:
        DataError: the source cannot be read, lacks a column, or has a column that does not hold strings.
        ConfigError: a package is missing.
    """
    keys = list(json_keys)
    yield from _blocks(path, _arrow_tables(path, suffix, keys), keys)


def read_dataset_blocks(name: Any, dataset: Any, json_keys: Sequence[str]) -> Iterator[RowBlock]:
    """Yield the columns `json_keys` of an open Dataset or IterableDataset, with `name` as the path of the blocks.

    Raises:
        DataError: the dataset cannot be read, lacks a column, or has a column that does not hold strings.
    """
    keys = list(json_keys)
    yield from _blocks(name, _dataset_tables(name, dataset, keys), keys)


def _blocks(path: Any, tables: Iterator[tuple[Any, float]], keys: list[str]) -> Iterator[RowBlock]:
    row, size = 1, 0
    for table, fraction in tables:
        _check_columns(path, table.schema, keys)
        size = size or _size(path)
        columns = [_values(table.column(key)) for key in keys]
        yield RowBlock(path, "row", row, columns, int(size * fraction))
        row += table.num_rows


def read_array_blocks(path: Path | StorePath, json_keys: Sequence[str]) -> Iterator[RowBlock] | None:
    """Return blocks of a file that contains a JSON array of objects, or None if it is JSON Lines."""
    entries = json_array(path)
    if entries is None:
        return None
    columns = [
        [entry[key] if key in entry else NoValue(tuple(entry)) for entry in entries] for key in json_keys
    ]
    return iter([RowBlock(path, "entry", 1, columns, size_of(path))])


def read_rows(path: Source, suffix: str) -> Iterator[Mapping[str, Any]]:
    """Yield each row of a Parquet or Arrow file, a saved dataset or a dataset of the hub as Python values.

    Raises:
        DataError: it cannot be read.
        ConfigError: a package is missing.
    """
    rows = 0
    if isinstance(path, HubDataset) or path.is_dir():
        dataset = open_dataset(path)
        with _hub_errors(path, lambda: rows):
            for row in dataset:  # decodes its features
                rows += 1
                yield row
        return
    for table, _ in _arrow_tables(path, suffix, None):
        try:
            yield from table.to_pylist()
        except UnicodeDecodeError:
            raise _undecodable_row(path, table, rows) from None
        rows += table.num_rows


def _undecodable_row(path: Source, table: Any, rows: int) -> DataError:
    """Return an error that gives the first row of `table` whose text is not UTF-8. `rows` is the number of rows before
    the table.
    """
    for number in range(table.num_rows):
        try:
            table.slice(number, 1).to_pylist()
        except UnicodeDecodeError as error:
            bad = BadLine(path, rows + number + 1, None, reason_of(error, "text"), "row")
            return DataError(f"{bad}; correct or remove the row")
    raise AssertionError(f"each row of {path} can be decoded")


def open_dataset(path: Path | HubDataset) -> Any:
    """Open a saved folder or a hub dataset. Returns a Dataset or IterableDataset.

    Raises DataError if it cannot be read, and ConfigError if the folder contains several splits.
    """
    if isinstance(path, HubDataset):
        return path.load()
    datasets = import_package("datasets", str(path))
    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:  # the library has no error class of its own
        reason = " ".join(str(error).split())
        raise DataError(
            f"{path} cannot be read as a dataset that `save_to_disk` wrote ({reason}); copy it again"
        ) from error
    if isinstance(dataset, Mapping):
        names = list(dataset)
        raise ConfigError(
            f"{path} has the splits {', '.join(names)}; pass the folder of one, such as {path / names[0]} (in "
            "training, as data.train_data_path and data.valid_data_path)"
        )
    for file in getattr(dataset, "cache_files", ()):
        _check_saved_file(Path(file["filename"]))
    return dataset


def _check_saved_file(path: Path) -> None:
    """Raise DataError if a file of a saved dataset is truncated between two batches, which its reader accepts."""
    with path.open("rb") as file:
        is_stream = file.read(4) == END_OF_STREAM[:4]
        file.seek(0, os.SEEK_END)
        if is_stream:
            _check_end(path, file)


def json_array(path: Path | StorePath) -> list[dict[str, Any]] | None:
    """Return the entries of a JSON array file, or None if the file is JSON Lines. Raise DataError if it is invalid."""
    start = b""
    for piece, _ in read_pieces(path, 1 << 12):
        start = (start + piece).removeprefix(codecs.BOM_UTF8).lstrip()
        if start:
            break
    if start[:1] != b"[":
        return None
    content = b"".join(piece for piece, _ in read_pieces(path, 1 << 20))
    try:
        entries = json.loads(content.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
    except UnicodeDecodeError as error:
        mark = len(content) - len(error.object)
        raise DataError(f"{undecodable(path, error.object, error, offset=mark)}; correct the file") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}){utf16_hint(content)}; correct the file") from error
    if bad := next((n for n, entry in enumerate(entries, 1) if not isinstance(entry, dict)), None):
        raise DataError(f"{path} entry {bad} is not an object; correct or remove it")
    return entries


def _arrow_tables(path: Source, suffix: str, keys: list[str] | None) -> Iterator[tuple[Any, float]]:
    """Yield pyarrow tables or batches with at least the columns `keys` (None: all), and the fraction read so far."""
    if isinstance(path, HubDataset) or path.is_dir():
        yield from _dataset_tables(path, open_dataset(path), keys)
        return
    read = _parquet_batches if suffix == ".parquet" else _arrow_batches
    name = suffix.removeprefix(".")
    library = import_package("pyarrow", str(path))
    try:
        with path.open("rb") as file:
            yield from read(path, file, keys)
    except MegalithError:
        raise
    except (OSError, ValueError, library.ArrowException) as error:
        way_out = f"decompress it, because {name} files are read uncompressed"
        if path.suffix not in COMPRESSED:
            way_out = "it is damaged or another kind of file: copy it again"
        reason = " ".join(str(error).split())
        raise DataError(f"{path} cannot be read as {name} ({reason}); {way_out}") from error


def _parquet_batches(path: Source, file: Any, keys: list[str] | None) -> Iterator[tuple[Any, float]]:
    table = import_package("pyarrow.parquet", str(path)).ParquetFile(file)
    if keys is not None:
        _check_columns(path, table.schema_arrow, keys)
    rows, total = 0, max(table.metadata.num_rows, 1)
    for batch in table.iter_batches(ROWS, columns=keys):
        rows += batch.num_rows
        yield batch, rows / total


def _arrow_batches(path: Source, file: Any, keys: list[str] | None) -> Iterator[tuple[Any, float]]:
    """Read Arrow's file format or its stream format. `datasets` writes the stream format."""
    library = import_package("pyarrow", str(path))
    magic = file.read(6)
    file.seek(0)
    if magic == b"ARROW1":
        reader = library.ipc.open_file(file)
        batches = map(reader.get_batch, range(reader.num_record_batches))
    else:
        batches = iter(library.ipc.open_stream(file))
    size = max(_size(path), 1)
    for batch in batches:
        for start in range(0, batch.num_rows, ROWS):
            yield batch.slice(start, ROWS), file.tell() / size
    if magic[:4] == END_OF_STREAM[:4]:
        _check_end(path, file)


def _check_end(path: Source, file: Any) -> None:
    """Raise DataError if a file in Arrow's stream format does not end after the end-of-stream marker."""
    end = file.tell()
    file.seek(max(end - len(END_OF_STREAM), 0))
    if file.read(len(END_OF_STREAM)) != END_OF_STREAM:
        raise DataError(
            f"{path} ends after {end:,} bytes without the end marker of an Arrow stream; it is truncated: copy it again"
        )
    if file.read(1):
        raise DataError(
            f"{path} has more bytes after the end of its Arrow stream at byte {end:,}; write each stream to a file of "
            "its own"
        )


def _dataset_tables(path: Any, dataset: Any, keys: list[str] | None) -> Iterator[tuple[Any, float]]:
    columns = dataset.column_names  # None in some streams
    rows = 0
    with _hub_errors(path, lambda: rows):
        if keys is not None and columns is not None:
            _require(path, keys, columns)
            dataset = dataset.select_columns(keys)
        total = getattr(dataset, "num_rows", None) or 0
        for table in dataset.with_format("arrow").iter(ROWS):
            rows += table.num_rows
            yield table, rows / total if total else 0.0


@contextmanager
def _hub_errors(path: Source, rows: Callable[[], int]) -> Iterator[None]:
    """Convert errors that `datasets` raises while rows are read to DataError.

    `rows` returns the number of rows read.
    """
    try:
        yield
    except (MegalithError, GeneratorExit):
        raise
    except Exception as error:  # of the network, of a file format, of a loading script
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"{path} cannot be read after row {rows():,} ({reason}); check the network and the dataset"
        ) from error


def _check_columns(path: Source, schema: Any, keys: Sequence[str]) -> None:
    _require(path, keys, schema.names)
    types = import_package("pyarrow", str(path)).types
    for key in keys:
        kind = schema.field(key).type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        is_text = any(getattr(types, name)(kind) for name in TEXT_TYPES if hasattr(types, name))
        if not is_text and not types.is_null(kind):
            raise DataError(f"{path} has a column {key!r} of {kind}, not of strings; choose another key")


def _require(path: Source, keys: Sequence[str], columns: Sequence[str]) -> None:
    if missing := [key for key in keys if key not in columns]:
        raise DataError(
            f"{path} has no column {', '.join(missing)}; it has {', '.join(columns)}: set --json-keys or data.text_key"
        )


def _values(column: Any) -> list[bytes | None]:
    """Return the values of a column of strings as bytes."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column.cast(pyarrow.large_binary()).to_pylist()


def _size(path: Source) -> int:
    """Return the bytes of a file or folder, 0 for a dataset of the hub."""
    if not isinstance(path, Path | StorePath):
        return 0
    if isinstance(path, Path) and path.is_dir():
        return sum(part.stat().st_size for part in path.glob("*.arrow"))
    return size_of(path)


source_size = _size
