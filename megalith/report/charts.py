"""Chart helpers: curves reduced to visible detail, scales with round ticks, colours, and figures as PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megalith.io import atomic_path
from megalith.tables import format_si

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = list[tuple[float, float]]

COLOURS = ("#1f6feb", "#d9480f", "#2b8a3e", "#862e9c", "#b08900", "#0b7285", "#c2255c", "#495057")  # of runs
SMOOTHING = 30  # the smoothed curve is a mean over 1/30 of the run
ROUNDING = 1e-9  # relative difference of values that count as equal
MIN_SPAN = 1e-300  # of an axis with ticks
TICKS = 5
MAX_LABEL = 8  # characters of a tick label


def smooth(points: Points, window: int) -> Points:
    """Return the moving mean over the `window` points centred on each point (`window` + 1 if `window` is even).

    At both ends, where the window does not fit, the values come from a least-squares line through the first or last
    window. So slopes are not shifted, and the ends are as smooth as the rest.
    """
    if not points:
        return []
    steps, values = np.array(points, np.float64).T
    half = min(window, len(points) - 1) // 2
    windows = np.lib.stride_tricks.sliding_window_view(values, 2 * half + 1)
    offsets = np.arange(-half, half + 1)
    slopes = windows @ offsets / max((offsets**2).sum(), 1)
    first = np.arange(len(values)) - half  # of a window around each point
    nearest = np.clip(first, 0, len(windows) - 1)
    fitted = windows.mean(1)[nearest] + (first - nearest) * slopes[nearest]
    return list(zip(steps.tolist(), fitted.tolist()))


def means(points: np.ndarray, count: int) -> np.ndarray:
    """Return the means of at most `count` groups of consecutive points or values."""
    size = -(-len(points) // count) or 1
    whole = len(points) // size
    groups = points[: whole * size].reshape(whole, size, *points.shape[1:])
    rest = points[whole * size :]
    return np.concatenate([groups.mean(1), rest.mean(0, keepdims=True)] if len(rest) else [groups.mean(1)])


def smoothed(points: np.ndarray, count: int) -> Points:
    """Return a smoothed curve of at most `count` points."""
    averaged = [tuple(point) for point in means(points, count).tolist()]
    return smooth(averaged, len(averaged) // SMOOTHING)


def downsample(points: np.ndarray, count: int) -> Points:
    """Return at most about `count` points, keeping all spikes (M4 aggregation, Jugel et al. 2014).

    The steps are cut into `count / 4` intervals. The first, smallest, largest and last point of each interval are kept.
    """
    if len(points) <= count:
        return list(map(tuple, points.tolist()))
    steps, values = points[np.argsort(points[:, 0], kind="stable")].T
    width = (steps[-1] - steps[0]) / max(count // 4, 1) or 1.0
    bins = np.floor((steps - steps[0]) / width)
    starts = np.flatnonzero(np.diff(bins, prepend=np.nan))
    lengths = np.diff(starts, append=len(steps))
    kept = [starts, starts + lengths - 1]
    for extreme in (np.minimum, np.maximum):
        equal = np.flatnonzero(values == np.repeat(extreme.reduceat(values, starts), lengths))
        kept.append(equal[np.unique(bins[equal], return_index=True)[1]])
    shown = np.unique(np.concatenate(kept))
    return list(zip(steps[shown].tolist(), values[shown].tolist()))


def loss_limits(
    trained: Sequence[np.ndarray], smoothed: Sequence[Points], validated: Sequence[np.ndarray]
) -> tuple[float, float] | None:
    """Return the limits of the loss axis, or None without points.

    They reach from the minimum of all points to the maximum of the smoothed and validation curves, so that a single
    spike does not compress the curves.
    """
    tops = [y for points in [*smoothed, *validated] for _, y in points]
    if not tops:
        return None
    low = min(points[:, 1].min() for points in [*trained, *validated] if len(points))
    return limits_around(float(low), float(max(tops)), 0.05)


def limits_around(low: float, high: float, margin: float = 0.0) -> tuple[float, float]:
    """Return axis limits with a `margin` (fraction of the range) at both ends.

    If low and high are equal up to rounding, the margin is half of the value.
    """
    largest = max(abs(low), abs(high))
    if high - low <= max(ROUNDING * largest, MIN_SPAN):
        margin = largest / 2 if largest > MIN_SPAN else 0.5
        return low - margin, high + margin
    return low - margin * (high - low), high + margin * (high - low)


@dataclass(frozen=True)
class Scale:
    """The range of an axis."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Sequence[float], margin: float = 0.0) -> Scale:
        return cls(*limits_around(min(values, default=0.0), max(values, default=1.0), margin))

    def at(self, value: float) -> float:
        """Return the position of `value` on the axis, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return about TICKS round values in the range."""
        rough = (self.high - self.low) / TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next((m * power for m in (1, 2, 2.5, 5) if m * power >= rough), 10 * power)
        first = math.ceil(self.low / step)
        return [n * step for n in range(first, math.floor(self.high / step) + 1)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Return labels with three digits, or as many as distinguish them: `15k`, `6e-5`.

    If the labels become too long, all but the first show the difference from the first: `1.0000002`, `+5e-8`.
    """
    labels: list[str] = []
    for digits in range(3, 12):
        labels = [_short(format_si(tick, digits)) for tick in ticks]
        if len(set(labels)) == len(ticks):
            break
    if max(map(len, labels), default=0) > MAX_LABEL:
        labels[1:] = [f"+{_short(format_si(tick - ticks[0], 2))}" for tick in ticks[1:]]
    return labels


def _short(label: str) -> str:
    number, suffix = (label[:-1], label[-1]) if label[-1:] in "kMBT" else (label, "")
    if "." in number and "e" not in number:
        number = number.rstrip("0").rstrip(".")
    return number.replace("e-0", "e-").replace("e+0", "e") + suffix


def new_figure(width: float, height: float, dpi: int) -> Figure:
    """Return an empty figure of matplotlib, `width` × `height` inches, whose axes are laid out without overlaps."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=dpi, layout="constrained")


def style_axes(
    axes: Axes, title: str, label_size: float, hidden: Sequence[str] = ("top", "right", "left")
) -> None:
    """Put the title on the left, make tick labels of `label_size` points, and hide the tick marks and some edges."""
    axes.set_title(
        title, loc="left", y=1.0, fontsize=10, color="#343a40"
    )  # y=1: matplotlib need not search it
    axes.tick_params(labelsize=label_size, colors="#495057", length=0)
    for edge in hidden:
        axes.spines[edge].set_visible(False)


def legend_above(axes: Axes, columns: int, size: float) -> None:
    """Add a legend above the right end of the axes."""
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=columns,
        frameon=False,
        fontsize=size,
        borderaxespad=0.2,
    )


def save_png(figure: Figure, path: str | Path) -> Path:
    """Write the figure and create missing folders. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as partial:
        FigureCanvasAgg(figure).print_png(str(partial))
    return path
