"""Plots curves of one or several runs as a PNG: loss, validation, learning rate, gradient norm, speed and expert
load.

The curves are drawn from the files that a run writes (`metrics.jsonl`, `evaluations.jsonl`, `experts.jsonl`), so a run
can be drawn while it trains, after it has ended, and on another machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalith.report.charts import (
    COLOURS,
    Points,
    downsample,
    loss_limits,
    new_figure,
    save_png,
    smoothed,
    style_axes,
)
from megalith.report.run_files import RunFiles, metric_points, open_runs
from megalith.tables import format_si

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DASHES = (0, (4, 4))
MAX_POINTS = 3000  # of a smoothed curve, twice the width of the picture
MAX_DRAWN = 6000  # of the loss: an interval of `downsample` per pixel, so that no spike is missed
MAX_DRAWN_SMALL = 2000  # points of a small chart
MAX_LINES = 500  # for lost losses
PANELS = (
    ("lr", "learning rate", 1.4),
    ("grad_norm", "gradient norm, before clipping", 0.8),
    ("tokens_per_second_per_device", "tokens/s/device", 0.8),
)
"""Key, title and width of the line of each small chart."""


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
    runs = open_runs([runs] if isinstance(runs, str | Path) else runs)
    has_experts = any("moe_imbalance" in run.steps[-1] for run in runs)
    figure = new_figure(11, 7.5 + 2.5 * has_experts, 130)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    grid = figure.add_gridspec(2 + has_experts, 3, height_ratios=(2.1, 1, 1)[: 2 + has_experts])
    loss = figure.add_subplot(grid[0, :])
    panels = rate, _, speed = [figure.add_subplot(grid[1, column]) for column in range(3)]
    _draw_losses(loss, runs)
    for axes, (key, _, width) in zip(panels, PANELS):
        _draw_metric(axes, runs, key, linewidth=width)
    if has_experts:
        draw_experts([figure.add_subplot(grid[2, column]) for column in range(3)], runs)
    rate.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    speed.yaxis.set_major_formatter(lambda value, _: format_si(value))
    loss.legend(frameon=False, fontsize=9)
    speed.set_ylim(bottom=0)
    _style(loss, "loss (nats per token)")
    for axes, (_, title, _) in zip(panels, PANELS):
        _style(axes, title)
    return save_png(figure, output_png)


def draw_experts(axes: Sequence[Axes], runs: Sequence[RunFiles]) -> None:
    """Draw imbalance and balancing loss of all runs, and the last logged expert load of the first run that has one."""
    imbalance, aux, load = axes
    _draw_metric(imbalance, runs, "moe_imbalance", linewidth=0.8)
    _draw_metric(imbalance, runs, "moe_dropped", linewidth=0.8, linestyle=":")
    _draw_metric(aux, runs, "moe_aux_loss", linewidth=0.8)
    _style(imbalance, "busiest expert / mean (dotted: dropped)")
    _style(aux, "balancing loss (1: even)")
    run = next((run for run in runs if run.expert_load), None)
    if run is None:
        load.set_axis_off()
        return
    layers, rows = zip(*run.expert_load)
    relative = [sorted(row, reverse=True) for row in rows]
    image = load.imshow(relative, aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
    load.figure.colorbar(image, ax=load)
    _style(load, f"load / mean by layer, step {run.experts['step']}")
    load.grid(False)
    step = -(-len(rows) // 8)
    load.set_yticks(range(0, len(rows), step), layers[::step])
    load.set_xlabel("experts, busiest first", fontsize=8, color="#495057")


def _draw_losses(axes: Axes, runs: Sequence[RunFiles]) -> None:
    """Draw each run's loss, smoothed loss and validation loss, and mark the steps without a finite loss."""
    losses = [run.curve("loss") for run in runs]
    curves = [smoothed(points, MAX_POINTS) for points in losses]
    checks = [metric_points(run.evaluations, "validation_loss") for run in runs]
    first_names: dict[bytes, str] = {}
    for n, (run, points) in enumerate(zip(runs, losses)):
        name, colour, style = run.name.replace("$", r"\$"), COLOURS[n % len(COLOURS)], "-"
        first = first_names.setdefault(points.tobytes(), name)
        if first != name:  # an identical curve would hide the first
            name, style = f"{name}, as {first}", DASHES
        axes.plot(*_xy(downsample(points, MAX_DRAWN)), color=colour, linewidth=0.7, alpha=0.3)
        axes.plot(*_xy(curves[n]), color=colour, linestyle=style, linewidth=1.8, label=name)
        if len(checks[n]):
            axes.plot(
                *checks[n].T,
                color=colour,
                linestyle="none",
                marker="o",
                markersize=6,
                markerfacecolor="white",
                markeredgewidth=1.6,
                label=f"{name}, validation (last {checks[n][-1][1]:.3f})",
            )
        bad_steps = run.nonzero_steps("nan_iterations")
        if bad_steps:
            heights = axes.get_xaxis_transform()  # from the bottom of the chart to its top
            label = f"{name}, lost losses (NaN): {len(bad_steps)}"
            lines = dict(colors=colour, linewidth=1, linestyle=":", label=label)
            shown = bad_steps[:: -(-len(bad_steps) // MAX_LINES)]  # there may be thousands
            axes.vlines(shown, 0, 1, transform=heights, **lines)
    axes.set_ylim(*(loss_limits(losses, curves, checks) or (None, None)))


def _draw_metric(axes: Axes, runs: Sequence[RunFiles], key: str, **style: Any) -> None:
    for n, run in enumerate(runs):
        axes.plot(*_xy(downsample(run.curve(key), MAX_DRAWN_SMALL)), color=COLOURS[n % len(COLOURS)], **style)


def _style(axes: Axes, title: str) -> None:
    style_axes(axes, title, 8)
    axes.grid(True, color="#e9ecef", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.spines["bottom"].set_color("#ced4da")
    axes.xaxis.set_major_formatter(lambda value, _: format_si(value))
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)
    axes.set_xlabel("step", fontsize=8, color="#495057")


def _xy(points: Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
