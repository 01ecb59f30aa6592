"""JSON Lines written from other corpora: Hugging Face datasets, parquet, and Python's standard library.

The standard library is the embedded default: real text that is present on every machine without a download, 10 to
15 MB of code, comments and prose. Tests, generated tables and installed packages are left out.
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
EXCLUDED_PREFIXES = ("_sysconfigdata_",)  # this machine's build, full of its own paths


@dataclass(frozen=True)
class CorpusSummary:
    """`bytes` of UTF-8 text, without the JSON around it."""

    path: Path
    documents: int
    bytes: int


def write_dataset(
    source: str, output_jsonl: str | Path, keys: Sequence[str] = ("text",), *, overwrite: bool = False
) -> Path:
    """Writes the columns `keys` of `source` as JSON Lines; returns the file to read, `source` itself if it is such.

    `source`: a `.parquet` or `.jsonl` file, or NAME[:SPLIT] of a dataset of the Hugging Face hub, which is looked for
    in the local cache first (its split `train` where none is named). DataError: it cannot be had, has no such column,
    the output exists, or the package that reads it is not installed.
    """
    output = Path(output_jsonl)
    if source.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        return Path(source)
    if Path(source).is_file() and not source.endswith(".parquet"):
        raise DataError(
            f"{source} is a file, and --dataset takes a dataset's name, a .parquet or a .jsonl file; write JSON Lines, "
            '{"text": "…"} on a line for each document, and give them as --input'
        )
    if output.exists() and not overwrite:
        raise DataError(
            f"{output} exists and is not overwritten; give it as --input, or set overwrite (--overwrite)"
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
    except (OSError, ValueError) as error:  # pyarrow's own errors are among these
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
            f"not be fetched ({reason}); download it where there is a network, check its name, or give JSON Lines by "
            "--input"
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


def _check_columns(source: str, keys: Sequence[str], there: Sequence[str]) -> None:
    if missing := [key for key in keys if key not in there]:
        raise DataError(
            f"{source} has no column {', '.join(missing)}; it has {', '.join(there)}: give --json-keys"
        )


def write_stdlib_corpus(output_jsonl: str | Path, *, overwrite: bool = False) -> CorpusSummary:
    """Write the standard library as JSON Lines, `{"text": …, "path": …}` for each module.

    The order is that of each path's hash: the same every time, and mixed, so that the last documents, which
    become the validation split, are not one package. DataError: the output exists, or no source is installed.
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
                "use another Python, or preprocess a text of your own"
            )
    return CorpusSummary(output, documents, size)


def _belongs(name: Path) -> bool:
    return not (EXCLUDED_FOLDERS & set(name.parts) or name.name.startswith(EXCLUDED_PREFIXES))
