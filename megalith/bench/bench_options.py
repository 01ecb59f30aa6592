"""Options and results that benchmarks share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalith.bench.workloads import WORKLOADS


def workload_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the argument `workload`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", choices=WORKLOADS, metavar="workload", help=", ".join(WORKLOADS))
    return parser


def add_result_options(parser: argparse.ArgumentParser, results: str = "append a line of JSON") -> None:
    """Add the options --results and --set. `results` is the help of --results."""
    parser.add_argument("--results", type=Path, metavar="FILE", help=results)
    parser.add_argument("--set", nargs="+", default=[], metavar="section.key=value", help="further settings")


def append_result(path: Path | None, result: Mapping[str, Any]) -> None:
    """Append the result to a file as a line of JSON. Does nothing without a file."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
