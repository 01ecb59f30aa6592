"""`--json`: one JSON document on standard output, without other text. docs/command_line.md lists the keys."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Iterator
from typing import Any

from megalith.errors import printable


def add_json_option(parser: argparse.ArgumentParser, keys: str, kind: str = "object") -> None:
    """Add `--json`, with the keys of the document in its help."""
    parser.add_argument("--json", action="store_true", help=f"print one JSON {kind} instead of text: {keys}")


def print_json(document: Any) -> None:
    """Print a document on one line. Paths become strings, and numbers that JSON lacks (NaN, infinity) become null."""
    print(json.dumps(_finite(document), ensure_ascii=False, default=str, allow_nan=False), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_written(args: argparse.Namespace, path: Any, note: str = "", **more: Any) -> None:
    """Print the path of a written file or folder: as `wrote PATH` and `note`, or as JSON with the additional keys
    `more`.
    """
    if args.json:
        print_json({"path": str(path), **more})
    else:
        print(f"wrote {printable(path)}{note}")


@contextlib.contextmanager
def text_on_stderr(enabled: bool) -> Iterator[None]:
    """Send text that is printed in this context to standard error if `enabled`, so that standard output has only the
    document.
    """
    with contextlib.redirect_stdout(sys.stderr) if enabled else contextlib.nullcontext():
        yield
