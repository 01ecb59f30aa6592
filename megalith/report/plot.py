"""Curves of one or several runs as a PNG: loss, validation, learning rate, gradient norm, speed and expert load.

They are drawn from the files that a run writes (`metrics.jsonl`, `evaluations.jsonl`, `experts.jsonl`), so a run can be
drawn while it trains, after it has ended, and on another machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalith.errors import DataError
from megalith.io import atomic_path
from megalith.progress import Progress
from megalith.remote import is_url
from megalith.report.metrics import (
    EVALUATIONS_FILE,
    EXPERTS_FILE,
    METRICS_FILE,
    metrics_size,
    read_records,
)
from megalith.tables import format_si

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Points = list[tuple[float, float]]

COLOURS = ("#1f6feb", "#d9480f", "#2b8a3e", "#862e9c", "#b08900", "#0b7285", "#c2255c", "#495057")
DASHES = (0, (4, 4))
MAX_POINTS = 3000  # of a smoothed curve, twice the width of the picture
SMOOTHING = 30  # the smoothed curve is a mean over 1/30 of the run
ROUNDING = 1e-9  # relative difference of values that count as equal
MIN_SPAN = 1e-300  # of an axis with ticks


def plot_run(runs: str | Path | Sequence[str | Path], output_png: str | Path) -> Path:
    """Draw loss, learning rate, gradient norm and tokens/s of one or several runs.

    Args:
        runs: one run folder, or several to compare.
        output_png: path of the picture; missing folders are created.

    Returns:
        The path of the picture.

    Raises:
        DataError: a folder has no metrics.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folders = [Path(runs)] if isinstance(runs, str | Path) else [Path(run) for run in runs]
    with Progress("read metrics", metrics_size(folders)) as progress:
        histories = [
            (folder, _steps(folder, progress), read_records(folder / EVALUATIONS_FILE)) for folder in folders
        ]

    has_experts = any("moe_imbalance" in steps[-1] for _, steps, _ in histories)
    figure = Figure(figsize=(11, 7.5 + 2.5 * has_experts), dpi=130, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    grid = figure.add_gridspec(2 + has_experts, 3, height_ratios=(2.1, 1, 1)[: 2 + has_experts])
    loss, rate, norm, speed = (
        figure.add_subplot(cell) for cell in (grid[0, :], grid[1, 0], grid[1, 1], grid[1, 2])
    )
    names, first_names = [name.replace("$", r"\$") for name in run_names(folders)], {}
    for name, (_, steps, evaluations), colour in zip(names, histories, _cycle(COLOURS, len(histories))):
        first = first_names.setdefault(tuple(_points(steps, "loss")), name)
        if first != name:  # an identical curve would hide the first
            _draw_loss(loss, f"{name}, as {first}", steps, evaluations, colour, DASHES)
        else:
            _draw_loss(loss, name, steps, evaluations, colour)
        rate.plot(*_xy(_points(steps, "lr")), color=colour, linewidth=1.4)
        norm.plot(*_xy(_points(steps, "grad_norm")), color=colour, linewidth=0.8)
        speed.plot(*_xy(_points(steps, "tokens_per_second_per_device")), color=colour, linewidth=0.8)

    if has_experts:
        draw_experts([figure.add_subplot(grid[2, column]) for column in range(3)], histories)
    rate.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    speed.yaxis.set_major_formatter(lambda value, _: format_si(value))
    trained = [_points(steps, "loss") for _, steps, _ in histories]
    validated = [_points(evaluations, "validation_loss") for _, _, evaluations in histories]
    curves = [smoothed(points, MAX_POINTS) for points in trained]
    loss.set_ylim(*(loss_limits(trained, curves, validated) or (None, None)))
    loss.legend(frameon=False, fontsize=9)
    speed.set_ylim(bottom=0)
    for axes, title in (
        (loss, "loss (nats a token)"),
        (rate, "learning rate"),
        (norm, "gradient norm, before clipping"),
        (speed, "tokens/s/device"),
    ):
        _style(axes, title)
    output = Path(output_png)
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(output) as partial:
        FigureCanvasAgg(figure).print_png(str(partial))
    return output


def draw_experts(
    axes: Sequence[Axes], histories: Sequence[tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]]
) -> None:
    """Draw imbalance and balancing loss of all runs, and the last logged expert load of the first run that has one."""
    imbalance, aux, load = axes
    for (_, steps, _), colour in zip(histories, _cycle(COLOURS, len(histories))):
        imbalance.plot(*_xy(_points(steps, "moe_imbalance")), color=colour, linewidth=0.8)
        imbalance.plot(*_xy(_points(steps, "moe_dropped")), color=colour, linewidth=0.8, linestyle=":")
        aux.plot(*_xy(_points(steps, "moe_aux_loss")), color=colour, linewidth=0.8)
    _style(imbalance, "busiest expert / mean (dotted: dropped)")
    _style(aux, "balancing loss (1: even)")
    records = [read_records(folder / EXPERTS_FILE) for folder, _, _ in histories]
    last = next((lines[-1] for lines in records if lines), None)
    if last is None:
        load.set_axis_off()
        return
    rows = [sorted(row, reverse=True) for row in last["tokens"].values()]
    relative = [[value * len(row) / (sum(row) or 1) for value in row] for row in rows]
    image = load.imshow(relative, aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
    load.figure.colorbar(image, ax=load)
    _style(load, f"load / mean by layer, step {last['step']}")
    load.grid(False)
    layers, step = list(last["tokens"]), -(-len(rows) // 8)
    load.set_yticks(range(0, len(rows), step), layers[::step])
    load.set_xlabel("experts, busiest first", fontsize=8, color="#495057")


def loss_points(run_dir: str | Path) -> Points:
    """Return the finite (step, loss) points of a run folder."""
    with Progress("read metrics", metrics_size([run_dir])) as progress:
        return _points(_steps(Path(run_dir), progress), "loss")


def smooth(points: Points, window: int) -> Points:
    """Return the moving mean over `window` points around each point (one more if `window` is even).

    At both ends, where the window does not fit, the values come from a least-squares line through the first or last
    window. So a slope is not shifted and the ends are as smooth as the rest.
    """
    half = min(window, len(points) - 1) // 2
    values = [value for _, value in points]
    result = []
    for i, (step, _) in enumerate(points):
        centre = min(max(i, half), len(points) - 1 - half)
        around = values[centre - half : centre + half + 1]
        value = sum(around) / len(around)
        if i != centre:
            squares = sum(offset**2 for offset in range(-half, half + 1))
            value += (i - centre) * sum(offset * y for offset, y in enumerate(around, -half)) / squares
        result.append((step, value))
    return result


def means(points: Points, count: int) -> Points:
    """Return the means of at most `count` groups of consecutive points."""
    size = -(-len(points) // count) or 1
    groups = (points[first : first + size] for first in range(0, len(points), size))
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def smoothed(points: Points, count: int) -> Points:
    """Return a smoothed curve of at most `count` points."""
    averaged = means(points, count)
    return smooth(averaged, len(averaged) // SMOOTHING)


def _steps(folder: Path, progress: Progress) -> list[dict[str, Any]]:
    steps = read_records(folder / METRICS_FILE, progress)
    if not steps:
        raise DataError(
            f"there is nothing to plot in {folder}: {METRICS_FILE} is missing or empty; "
            "name the output folder of a run that has made a step"
        )
    return steps


def _points(records: list[dict[str, Any]], key: str) -> Points:
    """Return (step, value) of the records with a finite value."""
    pairs = [(record["step"], record.get(key)) for record in records]
    return [(step, value) for step, value in pairs if value is not None and math.isfinite(value)]


def run_names(folders: Sequence[str | Path]) -> list[str]:
    """Return a unique name for each run: the end of its path, and a number for a folder that is given twice.

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


def _draw_loss(
    axes: Axes,
    name: str,
    steps: list[dict[str, Any]],
    evaluations: list[dict[str, Any]],
    colour: str,
    style: Any = "-",
) -> None:
    points = _points(steps, "loss")
    axes.plot(*_xy(points), color=colour, linewidth=0.7, alpha=0.3)
    axes.plot(*_xy(smoothed(points, MAX_POINTS)), color=colour, linestyle=style, linewidth=1.8, label=name)
    checks = _points(evaluations, "validation_loss")
    if checks:
        axes.plot(
            *_xy(checks),
            color=colour,
            linestyle="none",
            marker="o",
            markersize=6,
            markerfacecolor="white",
            markeredgewidth=1.6,
            label=f"{name}, validation (last {checks[-1][1]:.3f})",
        )
    bad_steps = [record["step"] for record in steps if record.get("nan_iterations")]
    for step in bad_steps:
        label = f"{name}, lost losses (NaN): {len(bad_steps)}" if step == bad_steps[0] else None
        axes.axvline(step, color=colour, linewidth=1, linestyle=":", label=label)


def loss_limits(
    trained: Sequence[Points], smoothed: Sequence[Points], validated: Sequence[Points]
) -> tuple[float, float] | None:
    """Return the limits of the loss axis, or None without points.

    They reach from the minimum of all points to the maximum of the smoothed and validation curves, so that a single
    spike does not compress the curves.
    """
    tops = [y for points in [*smoothed, *validated] for _, y in points]
    if not tops:
        return None
    return limits_around(min(y for points in [*trained, *validated] for _, y in points), max(tops), 0.05)


def limits_around(low: float, high: float, margin: float = 0.0) -> tuple[float, float]:
    """Return axis limits with a `margin` (fraction of the range) at both ends.

    If low and high are equal up to rounding, the margin is half of the value.
    """
    largest = max(abs(low), abs(high))
    if high - low <= max(ROUNDING * largest, MIN_SPAN):
        margin = largest / 2 if largest > MIN_SPAN else 0.5
        return low - margin, high + margin
    return low - margin * (high - low), high + margin * (high - low)


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color="#343a40")
    axes.grid(True, color="#e9ecef", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors="#495057", length=0)
    axes.margins(x=0.01)
    for edge in ("top", "right", "left"):
        axes.spines[edge].set_visible(False)
    axes.spines["bottom"].set_color("#ced4da")
    axes.xaxis.set_major_formatter(lambda value, _: format_si(value))
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)
    axes.set_xlabel("step", fontsize=8, color="#495057")


def _xy(points: Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _cycle(values: Sequence[str], count: int) -> list[str]:
    return [values[i % len(values)] for i in range(count)]
