"""Reads a run's folder. Any file may be missing, cut off by a crash, or made by someone untrusted.

Values are finite floats that can be drawn. Anything else in the place of a number is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megalith.checkpoint.steps import list_steps
from megalith.config.yaml_loader import parse_yaml
from megalith.errors import DataError, MegalithError
from megalith.parallel.pipeline.timeline import Timeline, read_timeline
from megalith.progress import Progress
from megalith.remote import StorePath, open_location, size_of
from megalith.report.metrics import (
    EVALUATIONS_FILE,
    EVENTS_FILE,
    EXPERTS_FILE,
    MEASURED_FILE,
    METRICS_FILE,
    STARTS_FILE,
    read_records,
)

MAX_VALUE = 1e150  # larger values are ignored: their sums and differences could overflow
TAIL_BYTES = 2 * 2**20  # read from the end of a file of which the newest lines are shown
Points = list[tuple[float, float]]
Record = dict[str, Any]


def to_float(value: Any) -> float | None:
    """Return a number as a float; None for anything else and for numbers beyond MAX_VALUE."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -MAX_VALUE < value < MAX_VALUE else None  # False for NaN


def metric_points(records: Sequence[Record], key: str) -> Points:
    """Return (step, value) of the records that have both."""
    having = [record for record in records if record.get(key) is not None]
    pairs = [(to_float(record.get("step")), to_float(record[key])) for record in having]
    return [(step, value) for step, value in pairs if step is not None and value is not None]


@dataclass(frozen=True)
class RunFiles:
    """The files of a run, local or in a store. Properties raise OSError if the store does not answer."""

    name: str
    folder: Path | StorePath
    steps: list[Record] = field(repr=False)
    """Records of metrics.jsonl."""

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
                f"there is nothing to report in {folder}: {METRICS_FILE} is missing or empty; name the output folder "
                "of a run that has made a step"
            )
        return cls(name, location, steps)

    def curve(self, key: str) -> Points:
        """Return the points of a metric of metrics.jsonl."""
        return self._curves.get(key, [])

    @cached_property
    def _curves(self) -> dict[str, Points]:
        """The points of all metrics, collected in one pass because long runs have many records."""
        curves: dict[str, Points] = {}
        for record in self.steps:
            step = to_float(record.get("step"))
            for key, value in record.items() if step is not None else ():
                if type(value) in (float, int) and -MAX_VALUE < value < MAX_VALUE:  # False for NaN
                    curves.setdefault(key, []).append((step, float(value)))
        return curves

    @cached_property
    def evaluations(self) -> list[Record]:
        return read_records(self.folder / EVALUATIONS_FILE)

    @cached_property
    def experts(self) -> Record | None:
        """The last line of experts.jsonl."""
        return next(reversed(tail(self.folder / EXPERTS_FILE)), None)

    @cached_property
    def fp8_steps(self) -> list[Record]:
        """The records with FP8 metrics, which are logged every log.log_fp8_interval steps."""
        return [record for record in self.steps if any(key.startswith("fp8_") for key in record)]

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
        try:
            return list(list_steps(self.folder / "checkpoints"))
        except OSError:
            return []

    @cached_property
    def settings(self) -> dict[str, str]:
        return run_settings(self.folder)


def run_settings(folder: Path | StorePath) -> dict[str, str]:
    """Return `section.key` → value of a run's config.yaml; empty if it cannot be read."""
    try:
        tree = parse_yaml(_text(folder / "config.yaml"))
    except (yaml.YAMLError, ValueError, RecursionError, OSError):
        return {}
    sections = tree.items() if isinstance(tree, dict) else ()
    return {
        f"{section}.{key}": "" if value is None else str(value)
        for section, values in sections
        for key, value in (values.items() if isinstance(values, dict) else ())
    }


def tail(path: Path | StorePath, length: int = TAIL_BYTES) -> list[Record]:
    """Return the JSON objects in the last `length` bytes of a file. Raises OSError."""
    if not path.is_file():
        return []
    size = size_of(path)
    start = max(0, size - length)
    if isinstance(path, StorePath):
        content = path.read_range(start, size)
    else:
        with path.open("rb") as file:
            file.seek(start)
            content = file.read(length)
    lines = content.decode(errors="replace").split("\n")[1 if start else 0 :]
    records = (_parse_json(line) for line in lines if line)
    return [record for record in records if isinstance(record, dict)]


def _text(path: Path | StorePath) -> str:
    if not path.is_file() or size_of(path) > TAIL_BYTES:
        return ""
    return path.read_bytes().decode(errors="replace")


def _json(path: Path | StorePath) -> Any:
    return _parse_json(_text(path))


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def downsample(points: Points, count: int) -> Points:
    """Return about `count` points at most, keeping all spikes (M4 aggregation, Jugel et al. 2014).

    The steps are cut into `count / 4` intervals, of which the first, smallest, largest and last points are kept.
    """
    if len(points) <= count:
        return points
    low, high = points[0][0], points[-1][0]
    width = (high - low) / max(count // 4, 1) or 1.0
    steps, values = np.array(points).T
    bins = np.floor((steps - low) / width)
    order = np.argsort(bins, kind="stable")
    kept: Points = []
    for indices in np.split(order, 1 + np.flatnonzero(np.diff(bins[order]))):
        smallest, largest = indices[values[indices].argmin()], indices[values[indices].argmax()]
        kept += sorted({points[at] for at in (indices[0], indices[-1], smallest, largest)})
    return kept
