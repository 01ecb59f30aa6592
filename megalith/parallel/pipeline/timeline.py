"""Timeline of a step's actions, simulated or measured, and its file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megalith.errors import DataError
from megalith.io import replace_file
from megalith.parallel.pipeline.schedules import Action, Kind
from megalith.remote import StorePath, open_location
from megalith.small_files import read_small_file

TIMELINE_FILE = "pipeline.json"


@dataclass(frozen=True)
class Span:
    """An action of a rank, with its start and end."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Start and end of every action of a step, in any unit of time (measured ones: milliseconds)."""

    spans: list[list[Span]]
    """The actions of each rank, in order."""

    @cached_property
    def start(self) -> float:
        return min(spans[0].start for spans in self.spans)

    @cached_property
    def total(self) -> float:
        """Time from the start of the first action to the end of the last."""
        return max(span.end for spans in self.spans for span in spans) - self.start

    def busy(self, rank: int) -> float:
        """Return the total duration of the actions of `rank`."""
        return sum(span.end - span.start for span in self.spans[rank])

    @property
    def bubble(self) -> float:
        """Fraction of the ranks' time spent waiting, 0 to 1."""
        busy = sum(self.busy(rank) for rank in range(len(self.spans)))
        return 1.0 - busy / (len(self.spans) * self.total)


def write_timeline(run: str | Path, timeline: Timeline) -> Path:
    """Write a measured timeline (milliseconds) into a run's output folder, and return the file. Raises OSError."""
    path = Path(run) / TIMELINE_FILE
    ranks = [span_rows(spans) for spans in timeline.spans]
    replace_file(path, json.dumps({"unit": "ms", "ranks": ranks}))
    return path


def read_timeline(run: str | Path | StorePath) -> Timeline:
    """Return the timeline in a run's output folder. Raises DataError if it is missing or incomplete."""
    folder = open_location(run)
    path = folder / TIMELINE_FILE
    try:
        ranks = json.loads(read_small_file(path, folder))["ranks"]
        timeline = timeline_of(ranks)
    except FileNotFoundError:
        raise DataError(
            f"there is no {path}, which a run with a pipeline writes after some steps unless log.layout_report is "
            "false; pass the folder of such a run"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(f"{path} is not a timeline that a run wrote: {error}") from None
    if not timeline.spans or not all(timeline.spans):
        raise DataError(f"{path} has a rank without actions; measure the run again")
    return timeline


def span_rows(spans: Iterable[Span]) -> list[list]:
    """Return a rank's actions as JSON rows [kind, micro-batch, chunk, start, end]."""
    return [[s.action.kind.value, s.action.micro_batch, s.action.chunk, s.start, s.end] for s in spans]


def timeline_of(ranks: Sequence[Sequence[Sequence]]) -> Timeline:
    """Return the timeline of the `span_rows` of every rank. Raises ValueError or TypeError for invalid rows."""
    return Timeline([[_span(rank, *row) for row in rows] for rank, rows in enumerate(ranks)])


def _span(rank: int, kind: str, micro_batch: int, chunk: int, start: float, end: float) -> Span:
    counted = isinstance(micro_batch, int) and isinstance(chunk, int)
    if not (counted and math.isfinite(start) and math.isfinite(end) and start <= end):
        raise ValueError(
            f"rank {rank} has the action {[kind, micro_batch, chunk, start, end]}; an action is [kind, micro-batch, "
            "chunk, start, end] with whole numbers for micro-batch and chunk, and start <= end"
        )
    return Span(rank, Action(Kind(kind), micro_batch, chunk), start, end)
