"""Reads a run's folder. Any file may be missing, cut off by a crash, or written by someone untrusted.

Values are finite floats that can be drawn. Anything else in the place of a number is ignored.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megalith.errors import DataError, MegalithError
from megalith.parallel.pipeline.timeline import Timeline, read_timeline
from megalith.progress import Progress
from megalith.remote import StorePath, is_url, open_location, size_of
from megalith.report.metrics import (
    EVALUATIONS_FILE,
    EVENTS_FILE,
    EXPERTS_FILE,
    MEASURED_FILE,
    METRICS_FILE,
    STARTS_FILE,
    metrics_size,
    read_records,
)
from megalith.small_files import RefusedFile, read_small_file, resolve_regular

MAX_VALUE = 1e150  # larger values are ignored: their sums and differences could overflow
NUMBERS = {float, int, type(None)}  # NumPy converts them as `to_float` does; bool is another type
TAIL_BYTES = 2 * 2**20  # read from the end of a file to show its newest lines
Record = dict[str, Any]


def to_float(value: Any) -> float | None:
    """Return a number as a float, or None for anything else and for numbers beyond MAX_VALUE."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -MAX_VALUE < value < MAX_VALUE else None  # False for NaN


def metric_points(records: Sequence[Record], key: str) -> np.ndarray:
    """Return the steps and values of the records that have both, float64 [points, 2]."""
    return _points(_column(records, "step"), _column(records, key))


def _column(records: Sequence[Record], key: str) -> np.ndarray:
    """Return the values of a key, NaN where `to_float` returns None."""
    values = [record.get(key) for record in records]
    if set(map(type, values)) <= NUMBERS:
        with contextlib.suppress(OverflowError):  # an integer beyond float64
            column = np.array(values, np.float64)  # None becomes NaN
            column[~(np.abs(column) < MAX_VALUE)] = np.nan
            return column
    return np.array(list(map(to_float, values)), np.float64)


def _points(steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    points = np.stack([steps, values], 1)
    return points[~np.isnan(points).any(1)]


@dataclass(frozen=True)
class RunFiles:
    """The files of a run, local or in an object store. Properties raise OSError if the store does not answer."""

    name: str
    folder: Path | StorePath
    steps: list[Record] = field(repr=False)
    """Records of metrics.jsonl."""
    _curves: dict[str, np.ndarray] = field(default_factory=dict, init=False, repr=False)
    """Curves of metrics that have been read already."""

    @classmethod
    def open(cls, name: str, folder: str | Path | StorePath, progress: Progress | None = None) -> RunFiles:
        """Open a run. `progress` counts the bytes of its metrics.

        Raises:
            DataError: the folder has no metrics.
        """
        location = open_location(folder)
        steps = read_records(location / METRICS_FILE, progress)
        if not steps:
            raise DataError(
                f"there is nothing to show in {folder}: {METRICS_FILE} is missing or empty; pass the output "
                "folder of a run that has finished a step"
            )
        return cls(name, location, steps)

    def curve(self, key: str) -> np.ndarray:
        """Return the points of a metric of metrics.jsonl, float64 [points, 2]."""
        if key not in self._curves:
            records = self.steps if key in self._keys else []
            self._curves[key] = _points(self._step_column[: len(records)], _column(records, key))
        return self._curves[key]

    def nonzero_steps(self, key: str) -> list[float]:
        """Return the steps at which a metric is not 0."""
        steps, values = self.curve(key).T
        return steps[values != 0].tolist()

    @cached_property
    def _step_column(self) -> np.ndarray:
        return _column(self.steps, "step")

    @cached_property
    def _keys(self) -> frozenset[str]:
        return frozenset().union(*self.steps)

    @cached_property
    def evaluations(self) -> list[Record]:
        return read_records(self.folder / EVALUATIONS_FILE)

    @cached_property
    def experts(self) -> Record | None:
        """The last line of experts.jsonl, or None without the file."""
        return next(reversed(tail(self.folder / EXPERTS_FILE)), None)

    @cached_property
    def expert_load(self) -> list[tuple[str, list[float]]]:
        """Pairs (layer, tokens of each expert divided by the mean over experts) of the last logged step."""
        tokens = (self.experts or {}).get("tokens")
        rows = []
        for layer, counts in tokens.items() if isinstance(tokens, dict) else ():
            loads = [to_float(count) or 0.0 for count in counts] if isinstance(counts, list) else []
            mean = sum(loads) / len(loads) if loads else 0.0
            rows.append((str(layer)[:20], [load / mean if mean else 0.0 for load in loads]))
        return rows

    @cached_property
    def fp8_steps(self) -> list[Record]:
        """The records with FP8 metrics, which are logged every log.log_fp8_interval steps."""
        keys = {key for key in self._keys if key.startswith("fp8_")}
        return [record for record in self.steps if not keys.isdisjoint(record)] if keys else []

    @cached_property
    def events(self) -> list[Record]:
        return tail(self.folder / EVENTS_FILE)

    @cached_property
    def starts(self) -> list[Record]:
        return tail(self.folder / STARTS_FILE)

    @cached_property
    def completions(self) -> list[Record]:
        return tail(self.folder / "completions.jsonl")

    @cached_property
    def measured_ranks(self) -> list[Record]:
        """Times of the measured step in ms and peak memory in bytes, by rank."""
        content = _json(self.folder / MEASURED_FILE)
        ranks = content.get("ranks") if isinstance(content, dict) else None
        return [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []

    @cached_property
    def timeline(self) -> Timeline | None:
        try:
            return read_timeline(self.folder)
        except MegalithError:
            return None

    @cached_property
    def saved_steps(self) -> list[int]:
        """The steps that have a checkpoint."""
        from megalith.checkpoint.steps import (
            list_steps,  # imports the configuration, which `plot` does not need
        )

        try:
            return list(list_steps(self.folder / "checkpoints"))
        except OSError:
            return []

    @cached_property
    def settings(self) -> dict[str, str]:
        return run_settings(self.folder)


def open_runs(folders: Sequence[str | Path]) -> list[RunFiles]:
    """Open runs, each with a unique name. Raises DataError if a folder has no metrics."""
    with Progress("read metrics", metrics_size(folders)) as progress:
        return [RunFiles.open(name, folder, progress) for name, folder in zip(run_names(folders), folders)]


def run_names(folders: Sequence[str | Path]) -> list[str]:
    """Return a unique name per run: the end of its path, and a number if a folder is given twice.

    No name begins with an underscore, because matplotlib's legend omits such names. If a folder is a URL, the names are
    the folders as given.
    """
    if any(map(is_url, folders)):
        return list(map(str, folders))
    paths = [Path(folder).resolve() for folder in folders]
    names = []
    for number, path in enumerate(paths):
        others = {other for other in paths if other != path}
        for length in range(1, len(path.parts) + 1):
            name = str(Path(*path.parts[-length:]))
            if name[0] != "_" and all(other.parts[-length:] != path.parts[-length:] for other in others):
                break
        repeats = paths[:number].count(path)
        names.append(name + (f" ({repeats + 1})" if repeats else ""))
    return names


def run_settings(folder: Path | StorePath) -> dict[str, str]:
    """Return `section.key` → value of a run's config.yaml; empty if it cannot be read."""
    import yaml  # it and the configuration are not needed by `plot`

    from megalith.config.yaml_loader import parse_yaml

    try:
        tree = parse_yaml(_text(folder / "config.yaml"))
    except (yaml.YAMLError, ValueError, OSError):
        return {}
    sections = tree.items() if isinstance(tree, dict) else ()
    return {
        f"{section}.{key}": "" if value is None else str(value)
        for section, values in sections
        for key, value in (values.items() if isinstance(values, dict) else ())
    }


def tail(path: Path | StorePath, length: int = TAIL_BYTES) -> list[Record]:
    """Return the JSON objects in the last `length` bytes of a file; an empty list if the file is a link that leads out
    of its folder.

    Raises:
        OSError: the file cannot be read.
    """
    if not path.is_file():
        return []
    size = size_of(path)
    start = max(0, size - length)
    if isinstance(path, StorePath):
        content = path.read_range(start, size)
    else:
        try:
            real = resolve_regular(path, path.parent)
        except RefusedFile:
            return []
        with real.open("rb") as file:
            file.seek(start)
            content = file.read(length)
    lines = content.decode(errors="replace").split("\n")[1 if start else 0 :]
    records = (_parse_json(line) for line in lines if line)
    return [record for record in records if isinstance(record, dict)]


def _text(path: Path | StorePath) -> str:
    """Return a file's text, or "" if it is missing, larger than TAIL_BYTES or a link that leads out of its folder."""
    if not path.is_file():
        return ""
    try:
        return read_small_file(path, path.parent, TAIL_BYTES).decode(errors="replace")
    except RefusedFile:
        return ""


def _json(path: Path | StorePath) -> Any:
    return _parse_json(_text(path))


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
