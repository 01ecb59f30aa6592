"""Draws a plan as a PNG: the best layouts by time, memory by stage, and the pipeline's timeline."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Any

from megalith.planner.layout_text import MEMORY_HEADINGS
from megalith.planner.plan_result import PlanResult
from megalith.planner.step_time import PARTS
from megalith.report.charts import legend_above, new_figure, save_png, style_axes
from megalith.report.pipeline_drawing import PASS_COLOURS

GB = 1e9
COLOURS = (
    "#1f6feb",
    "#74a9e8",
    "#8cc79a",
    "#adb5bd",
    "#d9480f",
    "#f0a35e",
    "#862e9c",
    "#c2255c",
    "#ced4da",
    "#2b8a3e",
)


def draw_plan(answer: PlanResult, path: str | Path) -> Path:
    """Draw the time of the best layouts by operation, and the best layout's memory by stage and pipeline timeline."""
    best, timeline = answer.best[0], answer.best[0].time.timeline
    heights = [1 + 0.4 * len(answer.best), 1 + 0.3 * len(best.memory)]
    heights += [1 + 0.3 * len(timeline.spans)] if timeline is not None else []
    figure = new_figure(12, sum(heights) + 0.5, 110)
    figure.suptitle(f"the best: {best.name}", fontsize=10, color="#343a40")
    axes = list(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
    bars, memory = axes[0], axes[1]
    rows = range(len(answer.best))
    _stack(bars, rows, {name: [1e3 * each.time.parts[name] for each in answer.best] for name in PARTS})
    bars.set_yticks(rows, [fill(each.name, 50) for each in answer.best], fontsize=7)
    parts = {
        MEMORY_HEADINGS[part]: [getattr(stage, part) / GB for stage in best.memory]
        for part in MEMORY_HEADINGS
    }
    _stack(memory, range(len(best.memory)), parts)
    memory.axvline(answer.usable / GB, color="#c2255c", linewidth=1.2, linestyle="--")
    memory.set_yticks(range(len(best.memory)), [f"stage {n}" for n in range(len(best.memory))], fontsize=7)
    titles = [
        (bars, "ms per step, by part"),
        (memory, "GB per GPU, by stage (dashed: available)"),
    ]
    if timeline is not None:
        for rank, spans in enumerate(timeline.spans):
            for kind, colour in PASS_COLOURS.items():
                boxes = [(1e3 * s.start, 1e3 * (s.end - s.start)) for s in spans if s.action.kind is kind]
                axes[2].broken_barh(
                    boxes, (rank - 0.42, 0.84), facecolors=colour, edgecolor="white", linewidth=0.3
                )
        ranks = range(0, len(timeline.spans), -(-len(timeline.spans) // 16))
        axes[2].set_yticks(ranks, [f"rank {number}" for number in ranks])
        axes[2].invert_yaxis()
        titles.append(
            (axes[2], "the pipeline's first micro-batches, ms by rank (blue: forward, orange: backward)")
        )
    for each, title in titles:
        style_axes(each, title, 7)
    return save_png(figure, path)


def _stack(axes: Any, rows: range, parts: dict[str, list[float]]) -> None:
    start = [0.0] * len(rows)
    for colour, (name, values) in zip(COLOURS, parts.items()):
        if not any(values):
            continue
        axes.barh(rows, values, 0.75, start, color=colour, label=name)
        start = [a + b for a, b in zip(start, values)]
    axes.invert_yaxis()
    legend_above(axes, 5, 7)
