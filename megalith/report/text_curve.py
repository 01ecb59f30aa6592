"""Curves drawn as text, for a run's loss in a terminal: with Braille characters, or as a single line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from megalith.report.charts import means

SPARKS = "▁▂▃▄▅▆▇█"
# Bits of a Braille character above U+2800, by row and column of the dot.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def text_curve(points: Iterable[tuple[float, float]], width: int = 80, height: int = 13) -> str:
    """Draw the curve through `points` as text of at most `width` columns and `height` + 2 lines.

    A Braille character has 2 × 4 dots. Each column of dots shows the mean of its points. The left edge is labelled with
    values, the bottom with the first and last step.
    """
    points = [(x, y) for x, y in points if math.isfinite(y)]
    if not points:
        return "(no points to draw)"
    low, high = min(y for _, y in points), max(y for _, y in points)
    if low == high:
        low, high = low - 0.5, high + 0.5
    labels = [f"{high - (high - low) * row / (height - 1):.2f}" for row in range(height)]
    margin = max(len(label) for label in labels)
    columns = max(10, width - margin - 2)

    canvas = _braille_line(_column_means(points, 2 * columns), 4 * height, low, high, columns)
    labelled = {round(quarter * (height - 1) / 4) for quarter in range(5)}
    lines = []
    for row in range(height):
        label = labels[row] if row in labelled else ""
        lines.append(f"{label:>{margin}} {'┤' if label else '│'}{''.join(canvas[row])}".rstrip())
    first, last = f"step {points[0][0]:g}", f"{points[-1][0]:g}"
    lines.append(" " * (margin + 1) + "└" + "─" * columns)
    lines.append(" " * (margin + 2) + first + " " * max(1, columns - len(first) - len(last)) + last)
    return "\n".join(lines)


def _column_means(points: Sequence[tuple[float, float]], columns: int) -> list[tuple[int, float]]:
    """Return (column, mean of its values) for the columns that have points."""
    start, span = points[0][0], (points[-1][0] - points[0][0]) or 1
    sums: dict[int, list[float]] = {}
    for x, y in points:
        sums.setdefault(round((x - start) / span * (columns - 1)), []).append(y)
    return [(column, sum(values) / len(values)) for column, values in sorted(sums.items())]


def _braille_line(
    means: list[tuple[int, float]], dots_high: int, low: float, high: float, columns: int
) -> list[list[str]]:
    """Draw the polyline through `means` as rows of characters, each 2 dots wide and 4 high."""
    bits = [[0] * columns for _ in range(dots_high // 4)]

    def row_of(value: float) -> int:
        return round((high - value) / (high - low) * (dots_high - 1))

    previous = None
    for x, value in means:
        y = row_of(value)
        for dot_x, dot_y in _segment(previous or (x, y), (x, y)):
            bits[dot_y // 4][dot_x // 2] |= _DOTS[dot_y % 4][dot_x % 2]
        previous = (x, y)
    return [[chr(0x2800 + mask) if mask else " " for mask in row] for row in bits]


def _segment(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the dots of the segment, including both ends."""
    count = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (
            round(start[0] + (end[0] - start[0]) * i / count),
            round(start[1] + (end[1] - start[1]) * i / count),
        )
        for i in range(count + 1)
    ]


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """Return the values as a line of about `width` characters. Each character shows the mean of consecutive values."""
    heights = means(np.array(values), width).tolist()
    low, high = min(heights, default=0.0), max(heights, default=0.0)
    return "".join(SPARKS[round((len(SPARKS) - 1) * (y - low) / ((high - low) or 1.0))] for y in heights)
