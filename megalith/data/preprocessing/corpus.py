"""The embedded default corpus: the source text of the running Python's own standard library.

Real text that is present on every machine, with no download: 10 to 15 MB of code, comments and prose. Tests,
generated tables and installed packages are left out.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from megalith.errors import DataError
from megalith.io import atomic_file

EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
EXCLUDED_PREFIXES = ("_sysconfigdata_",)  # this machine's build, full of its own paths


@dataclass(frozen=True)
class CorpusSummary:
    """`bytes` of UTF-8 text, without the JSON around it."""

    path: Path
    documents: int
    bytes: int


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
    with atomic_file(output) as file:
        for name in names:
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
