"""What a run's folder holds for a reader: every file of it may be absent, torn, or made by a stranger.

Figures are finite floats that a drawing can take; whatever else stands where one is expected is left out.
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

LARGEST = 1e150  # beyond it sums and spans of figures overflow
TAIL = 2 * 2**20  # bytes of a file whose newest lines are shown
Points = list[tuple[float, float]]
Record = dict[str, Any]


def number(value: Any) -> float | None:
    """A figure as a float, or None for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -LARGEST < value < LARGEST else None  # False for NaN


def points(records: Sequence[Record], key: str) -> Points:
    """(step, figure) of the records that have both."""
    having = [record for record in records if record.get(key) is not None]
    pairs = [(number(record.get("step")), number(record[key])) for record in having]
    return [(step, value) for step, value in pairs if step is not None and value is not None]


@dataclass(frozen=True)
class RunFiles:
    """A run by its folder, here or in a store. Raises OSError where the store does not answer."""

    name: str
    folder: Path | StorePath
    steps: list[Record] = field(repr=False)
    """Of metrics.jsonl."""

    @classmethod
    def open(cls, name: str, folder: str | Path | StorePath, progress: Progress | None = None) -> RunFiles:
        """Raises DataError for a folder without metrics. `progress` counts their bytes."""
        where = open_location(folder)
        steps = read_records(where / METRICS_FILE, progress)
        if not steps:
            raise DataError(
                f"there is nothing to report in {folder}: {METRICS_FILE} is missing or empty; name the output folder "
                "of a run that has made a step"
            )
        return cls(name, where, steps)

    def curve(self, key: str) -> Points:
        """The points of a figure of metrics.jsonl."""
        return self._curves.get(key, [])

    @cached_property
    def _curves(self) -> dict[str, Points]:
        """The points of every figure: one pass over the records, of which a long run has many."""
        curves: dict[str, Points] = {}
        for record in self.steps:
            step = number(record.get("step"))
            for key, value in record.items() if step is not None else ():
                if type(value) in (float, int) and -LARGEST < value < LARGEST:  # False for NaN
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
        """Those of log.log_fp8_interval."""
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
        """Milliseconds of one step by rank, and the rank's peak of memory in bytes."""
        found = _json(self.folder / MEASURED_FILE)
        ranks = found.get("ranks") if isinstance(found, dict) else None
        return [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []

    @cached_property
    def timeline(self) -> Timeline | None:
        try:
            return read_timeline(self.folder)
        except MegalithError:
            return None

    @cached_property
    def saved_steps(self) -> list[int]:
        """The steps of the checkpoints that are there."""
        try:
            return list(list_steps(self.folder / "checkpoints"))
        except OSError:
            return []

    @cached_property
    def settings(self) -> dict[str, str]:
        return run_settings(self.folder)


def run_settings(folder: Path | StorePath) -> dict[str, str]:
    """`section.key` → its value, of a run's config.yaml; nothing where it cannot be read."""
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


def tail(path: Path | StorePath, length: int = TAIL) -> list[Record]:
    """The JSON objects among the last lines of a file. Raises OSError."""
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
    found = (_parsed(line) for line in lines if line)
    return [record for record in found if isinstance(record, dict)]


def _text(path: Path | StorePath) -> str:
    if not path.is_file() or size_of(path) > TAIL:
        return ""
    return path.read_bytes().decode(errors="replace")


def _json(path: Path | StorePath) -> Any:
    return _parsed(_text(path))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def downsample(known: Points, count: int) -> Points:
    """At most about `count` of the points: of each of count / 4 stretches of steps the first, the least, the greatest
    and the last, so that no spike is lost (the M4 aggregation of Jugel et al., 2014)."""
    if len(known) <= count:
        return known
    low, high = known[0][0], known[-1][0]
    width = (high - low) / max(count // 4, 1) or 1.0
    steps, values = np.array(known).T
    places = np.floor((steps - low) / width)
    order = np.argsort(places, kind="stable")
    kept: Points = []
    for stretch in np.split(order, 1 + np.flatnonzero(np.diff(places[order]))):
        least, greatest = stretch[values[stretch].argmin()], stretch[values[stretch].argmax()]
        kept += sorted({known[at] for at in (stretch[0], stretch[-1], least, greatest)})
    return kept
