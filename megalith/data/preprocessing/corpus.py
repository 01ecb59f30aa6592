"""JSON Lines from other corpora: Hugging Face datasets, Parquet, and Python's standard library.

The standard library is real text that every machine has without a download: 10 to 15 MB of code, comments and prose,
without tests, generated tables and installed packages.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from megalith.errors import DataError, install_line
from megalith.io import atomic_file
from megalith.progress import Progress

EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
EXCLUDED_PREFIXES = ("_sysconfigdata_",)  # build data with this machine's paths


@dataclass(frozen=True)
class CorpusSummary:
    """A written corpus. `bytes` counts UTF-8 text without JSON."""

    path: Path
    documents: int
    bytes: int


def write_dataset(
    source: str, output_jsonl: str | Path, keys: Sequence[str] = ("text",), *, overwrite: bool = False
) -> Path:
    """Write columns of a dataset as JSON Lines and return the file to read, which is `source` if it is one already.

    Args:
            source: a `.parquet` or `.jsonl` file, or NAME[:SPLIT] of a Hugging Face dataset (default: split `train`),
            which is
            looked up in the local cache first.
        output_jsonl: file to write.
        keys: columns to write.
        overwrite: replace an existing output.

    Raises:
        DataError: if the source is unavailable or lacks a column, the output exists, or a package is missing.
    """
    output = Path(output_jsonl)
    if source.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        return Path(source)
    if Path(source).is_file() and not source.endswith(".parquet"):
        raise DataError(
            f"{source} is a file, but --dataset takes a dataset's name, a .parquet or a .jsonl file; write JSON Lines, "
            'one {"text": "…"} per document, and pass them as --input'
        )
    if output.exists() and not overwrite:
        raise DataError(
            f"{output} exists and is not overwritten; pass it as --input, or set overwrite (--overwrite)"
        )
    rows = _parquet_rows(source, keys) if source.endswith(".parquet") else _hub_rows(source, keys)
    with atomic_file(output) as file, Progress("dataset", None, "rows") as progress:
        for row in rows:
            file.write(
                json.dumps({key: row[key] for key in keys}, ensure_ascii=False).encode("utf-8") + b"\n"
            )
            progress.add()
    return output


def _parquet_rows(path: str, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
    if not Path(path).is_file():
        raise DataError(f"there is no file {path}; check the path")
    parquet = _package("pyarrow.parquet", "pyarrow")
    try:
        file = parquet.ParquetFile(path)
        _check_columns(path, keys, file.schema_arrow.names)
        for batch in file.iter_batches(columns=list(keys)):
            yield from batch.to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors are subclasses
        raise DataError(f"{path} cannot be read as parquet: {error}; use another file") from error


def _hub_rows(source: str, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
    name, _, split = source.partition(":")
    datasets = _package("datasets", "datasets")
    try:
        dataset = datasets.load_dataset(name, split=split or "train")
    except (OSError, ValueError) as error:  # not found, offline, no such split
        reason = str(error).strip().split("\n")[0]
        raise DataError(
            f"the dataset {name!r} with split {split or 'train'!r} is not in the local Hugging Face cache and could "
            f"not be downloaded ({reason}); download it on a machine with a network, check its name, or pass JSON "
            "Lines as --input"
        ) from error
    _check_columns(name, keys, dataset.column_names)
    yield from dataset


def _package(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"the {package} package is not installed ({error}); run: {install_line('datasets')}"
        ) from error


def _check_columns(source: str, keys: Sequence[str], columns: Sequence[str]) -> None:
    if missing := [key for key in keys if key not in columns]:
        raise DataError(
            f"{source} has no column {', '.join(missing)}; it has {', '.join(columns)}: set --json-keys"
        )


def write_stdlib_corpus(output_jsonl: str | Path, *, overwrite: bool = False) -> CorpusSummary:
    """Write the standard library as JSON Lines, one `{"text": …, "path": …}` per module.

    Modules are ordered by the hash of their paths, so that the last documents, which become the validation split, do
    not come from a single package. Raise DataError if the output exists or no source is installed.
    """
    output = Path(output_jsonl)
    if output.exists() and not overwrite:
        raise DataError(
            f"{output} exists and is not overwritten; remove it, choose another output, or set overwrite (--overwrite)"
        )
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    names = [name for name in names if _belongs(name)]
    names.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
    documents = size = 0
    with atomic_file(output) as file, Progress("corpus", len(names), "files") as progress:
        for name in names:
            progress.add()
            try:
                text = (root / name).read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # a few modules declare another encoding
            if text.strip():
                line = json.dumps({"text": text, "path": name.as_posix()}, ensure_ascii=False)
                file.write(line.encode("utf-8") + b"\n")
                documents, size = documents + 1, size + len(text.encode("utf-8"))
        if documents == 0:
            raise DataError(
                f"this Python's standard library in {root} has no source files; "
                "use another Python, or preprocess your own text"
            )
    return CorpusSummary(output, documents, size)


def _belongs(name: Path) -> bool:
    return not (EXCLUDED_FOLDERS & set(name.parts) or name.name.startswith(EXCLUDED_PREFIXES))
