"""Timelines of a pipeline, simulated or measured, as text and as PNG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megalith.parallel.pipeline.schedules import Kind
from megalith.parallel.pipeline.timeline import Span, Timeline
from megalith.report.charts import legend_above, new_figure, save_png, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEGEND = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, input",
    Kind.BACKWARD_WEIGHT: "backward, weights",
}
PASS_COLOURS = {
    Kind.FORWARD: "#74a9e8",
    Kind.BACKWARD: "#f0a35e",
    Kind.BACKWARD_INPUT: "#f0a35e",
    Kind.BACKWARD_WEIGHT: "#8cc79a",
}
TEXT_LEGEND = (
    "digit: forward of that micro-batch (last digit); letter: backward (a of micro-batch 0, b of 1, …); "
    "capital: its wgrad; ·: waiting"
)
_ROW_INCHES = 0.42
_LABEL_INCHES = 0.16  # a box narrower than this has no number


def draw_text(timeline: Timeline, width: int = 120) -> str:
    """Draw one row per rank or chunk as text, with time from left to right in at most `width` columns."""
    names = [f"rank {rank}{f'.{chunk}' if chunk is not None else ''} " for rank, chunk in _rows(timeline)]
    margin = max(map(len, names))
    columns = width - margin
    if columns >= timeline.total and float(timeline.total).is_integer():
        columns = int(columns // timeline.total * timeline.total)  # equal width for every unit of time
    lines = []
    for name, (rank, chunk) in zip(names, _rows(timeline)):
        cells = _cells(timeline, rank, chunk, columns)
        lines.append(f"{name:{margin}}{''.join(cells)}".rstrip())
    return "\n".join(lines)


def draw_png(path: str | Path, timelines: Sequence[tuple[str, Timeline]], unit: str = "") -> Path:
    """Draw timelines below each other, each with its title, and return the path. `unit` labels the last one's axis."""
    heights = [max(2, len(list(_rows(timeline)))) * _ROW_INCHES + 0.9 for _, timeline in timelines]
    figure = new_figure(15, sum(heights) + 0.4, 110)
    all_axes = figure.subplots(len(timelines), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, timeline) in zip(all_axes, timelines):
        _draw(axes, title, timeline)
    all_axes[-1].set_xlabel(f"time ({unit})" if unit else "time", fontsize=9)
    return save_png(figure, path)


def _rows(timeline: Timeline) -> Iterator[tuple[int, int | None]]:
    """Yield (rank, chunk) of each row. chunk is None if the rank has only one."""
    for rank, spans in enumerate(timeline.spans):
        chunks = sorted({span.action.chunk for span in spans})
        yield from ((rank, chunk) for chunk in (chunks if len(chunks) > 1 else [None]))


def _cells(timeline: Timeline, rank: int, chunk: int | None, columns: int) -> Iterator[str]:
    """Yield the symbol of the action in the middle of each column; a blank if the rank works on another chunk."""
    spans, number = timeline.spans[rank], 0
    for column in range(columns):
        now = timeline.start + (column + 0.5) * timeline.total / columns
        while number < len(spans) and spans[number].end <= now:
            number += 1
        if number == len(spans) or spans[number].start > now:
            yield "·"
        elif chunk is not None and spans[number].action.chunk != chunk:
            yield " "
        else:
            yield _symbol(spans[number])


def _symbol(span: Span) -> str:
    kind, micro_batch = span.action.kind, span.action.micro_batch
    if kind is Kind.FORWARD:
        return str(micro_batch % 10)
    return chr(ord("A" if kind is Kind.BACKWARD_WEIGHT else "a") + micro_batch % 26)


def _draw(axes: Axes, title: str, timeline: Timeline) -> None:
    rows = list(_rows(timeline))
    named = set()
    axes.set_xlim(0, timeline.total)
    inch = timeline.total / 13.0  # the axes are about so many inches wide
    for row, (rank, chunk) in enumerate(rows):
        for span in timeline.spans[rank]:
            kind = span.action.kind
            if chunk is not None and span.action.chunk != chunk:
                continue
            start, length = span.start - timeline.start, span.end - span.start
            label = None if kind in named else LEGEND[kind]
            named.add(kind)
            axes.barh(
                row,
                length,
                0.86,
                start,
                color=PASS_COLOURS[kind],
                edgecolor="white",
                linewidth=0.6,
                label=label,
            )
            if length >= _LABEL_INCHES * inch:
                axes.text(
                    start + length / 2,
                    row,
                    str(span.action.micro_batch),
                    ha="center",
                    va="center",
                    fontsize=8,
                )
    axes.set_yticks(
        range(len(rows)),
        [f"rank {rank}" if chunk is None else f"rank {rank}, chunk {chunk}" for rank, chunk in rows],
        fontsize=9,
    )
    axes.set_ylim(len(rows) - 0.5, -0.5)
    legend_above(axes, 4, 8)
    axes.set_facecolor("#f1f3f5")
    style_axes(axes, title, 8, hidden=("top", "right", "left", "bottom"))
