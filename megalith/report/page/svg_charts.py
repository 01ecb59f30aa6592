"""Charts as SVG and HTML: curves, stacked bars, timelines and heat maps.

The SVGs contain no text and are stretched to their box; labels are HTML elements positioned in percent. So a chart fits
any width without scaling its text, and needs no script. The page's script adds the values under the pointer. All names
pass through `text`, because they may come from untrusted files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from megalith.errors import LINES, printable
from megalith.report.charts import Points, Scale, tick_labels
from megalith.tables import format_si

SIZE = 1000.0  # width and height of a chart in SVG units
COLOURS = 8  # of page.css
MAX_NAME = 300  # characters
MAX_MARKS = 200


def text(value: Any, length: int = MAX_NAME, keep: str = "") -> str:
    """Escape a value for HTML and cut it to `length` characters. `keep`: control characters to keep."""
    shown = str(value)
    return escape(printable(shown if len(shown) <= length else f"{shown[:length]}…", keep))


def preformatted(value: Any, length: int) -> str:
    """Return a text of several lines as HTML."""
    return f"<pre>{text(value, length, LINES)}</pre>"


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table. Cells are escaped unless they are `Html`."""
    head = "".join(f"<th>{text(heading)}</th>" for heading in headings)
    body = "".join(
        "<tr>"
        + "".join(f"<td>{cell if isinstance(cell, Html) else text(cell)}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    head, body = f"<thead><tr>{head}</tr></thead>", f"<tbody>{body}</tbody>"
    return f'<div class="scroll"><table>{head}{body}</table></div>'


class Html(str):
    """Markup that is inserted into the page without escaping."""


@dataclass(frozen=True)
class Curve:
    """A curve of a chart."""

    name: str
    points: Points
    colour: int
    """Index of the run."""
    style: str = "line"
    """Style of the curve: line, faint, dots or dashed."""


@dataclass(frozen=True)
class Mark:
    """A vertical line at a step with an event."""

    step: float
    name: str
    colour: int


def chart(
    title: str,
    curves: Sequence[Curve],
    *,
    limits: tuple[float, float] | None = None,
    marks: Sequence[Mark] = (),
    wide: bool = False,
) -> str:
    """Return a chart of curves over steps, or "" if there are no points."""
    steps = [x for curve in curves for x, _ in curve.points]
    if not steps:
        return ""
    across = Scale.around(steps)
    up = Scale(*limits) if limits else Scale.around([y for c in curves for _, y in c.points], 0.05)
    marks = [mark for mark in marks if across.low <= mark.step <= across.high][:MAX_MARKS]
    drawn = [_grid(up), *(_mark(mark, across) for mark in marks)]
    drawn += [_path(curve, across, up) for curve in curves if curve.points]
    values = tick_labels(up.ticks())
    room = f'style="--labels:{max(map(len, values), default=1)}"'
    labels = [
        f'<span class="y" style="top:{100 * (1 - up.at(tick)):.2f}%">{escape(label)}</span>'
        for tick, label in zip(up.ticks(), values)
    ]
    labels += [
        f'<span class="x" style="left:{100 * across.at(tick):.2f}%">{escape(label)}</span>'
        for tick, label in zip(across.ticks(), tick_labels(across.ticks()))
    ]
    data = f'data-x="{across.low!r} {across.high!r}" data-y="{up.low!r} {up.high!r}"'
    return (
        f'<figure class="chart{" wide" if wide else ""}"><figcaption>{text(title)}{_legend(curves)}</figcaption>'
        f'<div class="plot" {data} {room}><svg viewBox="0 0 {SIZE:g} {SIZE:g}" preserveAspectRatio="none" role="img" '
        f'aria-label="{text(title)}">{"".join(drawn)}</svg>{"".join(labels)}</div></figure>'
    )


def _grid(up: Scale) -> str:
    rows = (f"M0 {SIZE * (1 - up.at(tick)):.1f}H{SIZE:g}" for tick in up.ticks())
    return f'<path class="grid" d="{"".join(rows)}"/>'


def _mark(mark: Mark, across: Scale) -> str:
    x = SIZE * across.at(mark.step)
    return (
        f'<path class="mark c{mark.colour % COLOURS}" data-run="{mark.colour}" d="M{x:.2f} 0V{SIZE:g}">'
        f"<title>{text(mark.name)}</title></path>"
    )


def _path(curve: Curve, across: Scale, up: Scale) -> str:
    points = [(SIZE * across.at(x), SIZE * (1 - up.at(y))) for x, y in curve.points]
    if curve.style == "dots" or len(points) == 1:
        d = "".join(f"M{x:.2f} {y:.2f}h0" for x, y in points)
    else:
        d = "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in points)
    style = "dots" if len(points) == 1 else curve.style
    return (
        f'<path class="{style} c{curve.colour % COLOURS}" data-run="{curve.colour}" data-name="{text(curve.name)}" '
        f'd="{d}"/>'
    )


def _legend(curves: Sequence[Curve]) -> str:
    named = [curve for curve in curves if curve.style != "faint"]
    if len(named) < 2:
        return ""
    items = (
        f'<span class="key {curve.style} c{curve.colour % COLOURS}" data-run="{curve.colour}">{text(curve.name)}</span>'
        for curve in named
    )
    return f'<span class="legend">{"".join(items)}</span>'


def stacked_bars(title: str, rows: Sequence[tuple[str, dict[str, float], str]]) -> str:
    """Return horizontal bars. Rows are (label, values by segment, text after the bar). The longest bar fills
    the width.
    """
    longest = max((sum(parts.values()) for _, parts, _ in rows), default=0.0)
    if longest <= 0:
        return ""
    names = list(dict.fromkeys(name for _, parts, _ in rows for name, size in parts.items() if size > 0))
    body = "".join(
        f'<span class="label">{text(label)}</span><span class="bar">'
        + "".join(
            f'<i class="p{names.index(name) % COLOURS}" style="width:{100 * size / longest:.3f}%" '
            f'title="{text(name)}: {format_si(size)}"></i>'
            for name, size in parts.items()
            if size > 0
        )
        + f"</span><span>{text(end)}</span>"
        for label, parts, end in rows
    )
    return _rows(title, body, names)


def timeline(
    title: str, rows: Sequence[Sequence[tuple[int, float, float, str]]], names: Sequence[str]
) -> str:
    """Return a timeline of each rank's actions, given as (index of the kind, start, end, description).

    `names` are the kinds' names.
    """
    times = Scale.around([time for row in rows for _, start, end, _ in row for time in (start, end)])
    if not any(rows):
        return ""
    body = "".join(
        f'<span class="label">rank {rank}</span><svg class="spans" viewBox="0 0 {SIZE:g} 20" '
        f'preserveAspectRatio="none" role="img" aria-label="actions of rank {rank}">'
        + "".join(
            f'<rect class="p{kind % COLOURS}" x="{SIZE * times.at(start):.2f}" y="1" height="18" '
            f'width="{SIZE * (times.at(end) - times.at(start)):.2f}"><title>{text(description)}</title></rect>'
            for kind, start, end, description in row
        )
        + "</svg><span></span>"
        for rank, row in enumerate(rows)
    )
    return _rows(title, body, names)


def heat_map(title: str, rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Return HTML with rows of colored cells: 0 is blank, and the largest value has the full color."""
    most = max((value for _, values in rows for value in values), default=0.0)
    if most <= 0:
        return ""
    body = "".join(
        f'<span class="label">{text(label)}</span><span class="heat">'
        + "".join(
            f'<i style="--share:{100 * max(value, 0.0) / most:.0f}%" title="{value:.3g}"></i>'
            for value in values
        )
        + f"</span><span>{max(values, default=0.0):.2f}</span>"
        for label, values in rows
    )
    return _rows(title, body)


def _rows(title: str, body: str, names: Sequence[str] = ()) -> str:
    """Return a figure of labelled rows, with a legend of `names`."""
    keys = "".join(
        f'<span class="key box p{n % COLOURS}">{text(name)}</span>' for n, name in enumerate(names)
    )
    caption = f'<figcaption>{text(title)}<span class="legend">{keys}</span></figcaption>'
    return f'<figure class="chart wide">{caption}<div class="rows">{body}</div></figure>'
