"""Converts corpora to JSON Lines: Hugging Face datasets, tables, and Python's standard library.

The standard library is real text that every machine has without a download: 10 to 15 MB of code, comments and prose,
without tests, generated tables and installed packages.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megalith.data.inputs.hub_dataset import SCHEME, HubDataset
from megalith.data.inputs.sources import expand_inputs, read_document_blocks
from megalith.errors import DataError
from megalith.io import atomic_file
from megalith.progress import Progress

EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
EXCLUDED_PREFIXES = ("_sysconfigdata_",)  # build data with this machine's paths


@dataclass(frozen=True)
class CorpusSummary:
    """Summary of a written corpus. `bytes` counts UTF-8 text without JSON."""

    path: Path
    documents: int
    bytes: int


def write_dataset(
    source: str, output_jsonl: str | Path, keys: Sequence[str] = ("text",), *, overwrite: bool = False
) -> Path:
    """Write columns of a dataset as JSON Lines and return the file's path.

    If `source` is JSON Lines, return it unchanged.

    Args:
        source: a `.parquet` or `.jsonl` file, or NAME[:SPLIT] of a Hugging Face dataset (default: split `train`),
            which is looked up in the local cache first.
        output_jsonl: file to write.
        keys: columns to write.
        overwrite: replace an existing output.

    Raises:
        DataError: if the source is unavailable, lacks a column or has a value that is not a string, or the output
            exists.
        ConfigError: if a package is missing.
    """
    output = Path(output_jsonl)
    if source.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        return Path(source)
    if Path(source).exists() and not source.endswith(".parquet"):
        raise DataError(
            f"{source} is a file, but --dataset takes a dataset's name, a .parquet or a .jsonl file; write JSON Lines, "
            'one {"text": "…"} per document, or .txt files, and pass them as --input'
        )
    if output.exists() and not overwrite:
        raise DataError(f"{output} already exists; pass it as --input, or set overwrite (--overwrite)")
    if source.endswith(".parquet"):
        (path,) = expand_inputs([source])
    else:
        name, _, split = source.removeprefix(SCHEME).partition(":")
        path = HubDataset(
            f"{SCHEME}{name}?split={split or 'train'}" if "?" not in name else f"{SCHEME}{name}"
        )
    with atomic_file(output) as file, Progress("dataset", None, "rows") as progress:
        for block in read_document_blocks(path, keys):
            records, bad_rows = block.parse(keys)
            if bad_rows:
                raise DataError(f"{bad_rows[0]}; pass the dataset as --input, with --on-error skip")
            for record in records:
                line = json.dumps(dict(zip(keys, record.texts)), ensure_ascii=False)
                file.write(line.encode("utf-8") + b"\n")
            progress.add(len(records))
    return output


def write_stdlib_corpus(output_jsonl: str | Path, *, overwrite: bool = False) -> CorpusSummary:
    """Write the standard library as JSON Lines, one `{"text": …, "path": …}` per module.

    Modules are ordered by the hash of their paths, so that the last documents, which become the validation split, do
    not come from a single package. Raise DataError if the output exists or no source is installed.
    """
    output = Path(output_jsonl)
    if output.exists() and not overwrite:
        raise DataError(
            f"{output} already exists; remove it, choose another output, or set overwrite (--overwrite)"
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
