"""A plan as text and JSON, and as a PNG: memory by stage, the pipeline's timeline, the best layouts by their time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import Any

from megalith.io import atomic_path
from megalith.planner.goodput import Goodput
from megalith.planner.plan_result import PlannedLayout, PlanResult, changed
from megalith.planner.step_time import PARTS, caution
from megalith.report.console import columns, render, render_lines, si
from megalith.report.layout_text import (
    MEMORY_HEADINGS,
    format_amount,
    memory_unit,
    plain_table,
    wrap_paragraph,
)

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
EXPLAINED = 5


def plan_text(answer: PlanResult, tokens: float | None, price: float | None, explain: bool = False) -> str:
    """The whole answer, a hundred columns wide."""
    config, rates = answer.config, answer.rates
    batch, seq = config.train.global_batch_size, config.data.seq_length
    precision = "FP8" if config.train.fp8_format else config.train.precision
    model = config.model.preset or config.model.init_from or "the model"
    tried = "One layout" if answer.tried == 1 else f"{answer.tried:,} layouts"
    room = f"{answer.fitting:,} fit in {answer.usable / GB:.0f} GB a GPU"
    sequences = "one sequence" if batch == 1 else f"{batch:,} sequences"
    parts = [
        wrap_paragraph(
            f"{model} on {answer.gpus:,} {rates.device}, {answer.gpus_per_node} a node: "
            f"{sequences} of {seq:,} tokens a step, {precision}. "
            f"{tried} tried, {room}. Rates: {rates.source}."
        )
    ]
    if not answer.best:
        return "\n".join([*parts, *map(wrap_paragraph, _nothing_fits(answer))])
    parts += [best_table(answer, tokens, price), wrap_paragraph(MFU_NOTE)]
    optim = answer.best[0].config.optim
    if optim.reduces_moments and not config.optim.reduces_moments:
        parts += [wrap_paragraph(MOMENTS_NOTE.format(optim.exp_avg_dtype))]
    parts += ["", layout_details(answer.best[0])]
    if explain:
        parts += ["", *map(wrap_paragraph, explained(answer))]
    return "\n".join(parts)


MFU_NOTE = "MFU by the causal convention (attention's matrix at half); memory of the fullest GPU, estimated."
MOMENTS_NOTE = (
    "note: nothing fits with the moments in fp32 on the GPUs. In {} they change the updates' numbers: see "
    "optim.exp_avg_dtype"
)


def best_table(answer: PlanResult, tokens: float | None, price: float | None) -> str:
    """A line of figures for each layout, and one or two that name it."""
    headings = ["", "ms a step", "tokens/s/GPU", "MFU", "GB", "bubble", "exposed"]
    headings += (["days"] if tokens else []) + (["cost"] if tokens and price else [])
    table = plain_table(*headings, left=0)
    for number, each in enumerate(answer.best, 1):
        row = [str(number), *figures(each)]
        if tokens:
            days = answer.days(each, tokens)
            row += [f"{days:,.1f}"] + ([si(days * 24 * answer.gpus * price)] if price else [])
        table.add_row(*row)
    heading, rows = render_lines(table)
    indent = " " * (len(str(len(rows))) + 3)
    names = [
        fill(each.name, columns(), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        for each in answer.best
    ]
    return "\n".join([*heading, *(line for pair in zip(rows, names) for line in pair)])


def figures(layout: PlannedLayout) -> list[str]:
    time, speed = layout.time, layout.speed
    return [
        f"{1e3 * time.seconds:,.0f}",
        f"{speed.tokens_per_second_per_device:,.0f}",
        "–" if speed.mfu is None else f"{speed.mfu:.1%}",
        f"{layout.bytes / GB:.1f}",
        f"{time.bubble:.1%}",
        f"{time.exposed:.1%}",
    ]


def layout_details(layout: PlannedLayout) -> str:
    """Where a layout's time and memory go."""
    unit, size = memory_unit(stage.total for stage in layout.memory)
    memory = plain_table("stage", *MEMORY_HEADINGS.values(), f"total {unit}", left=1)
    for number, stage in enumerate(layout.memory):
        memory.add_row(
            str(number),
            *(format_amount(getattr(stage, part), size) for part in MEMORY_HEADINGS),
            format_amount(stage.total, size),
        )
    shares = ", ".join(
        f"{name} {layout.time.parts[name] / layout.time.seconds:.1%}"
        for name in PARTS
        if layout.time.parts[name]
    )
    note = caution(layout.config)
    return "\n".join(
        [
            wrap_paragraph(f"{layout.name}: {1e3 * layout.time.seconds:,.1f} ms a step: {shares}"),
            wrap_paragraph("(tensor, context, expert, data: communication that is waited for)"),
            *([wrap_paragraph(f"note: {note}")] if note else []),
            render(memory),
        ]
    )


def explained(answer: PlanResult) -> Iterator[str]:
    """Why the next ones are slower, why others do not fit, and what the trainer refused."""
    best = answer.best[0]
    for number, each in enumerate(answer.best[1:], 2):
        more = {name: each.time.parts[name] - best.time.parts[name] for name in PARTS}
        worst = sorted(more, key=more.__getitem__, reverse=True)[:2]
        why = ", ".join(f"{name} +{1e3 * more[name]:,.0f} ms" for name in worst if more[name] > 0)
        yield f"{number}. {each.time.seconds / best.time.seconds - 1:+.1%}: {why or 'as fast'} ({each.name})"
    for each in answer.too_large[:EXPLAINED]:
        yield f"does not fit: {_too_large(each, answer)}"
    for sentence, times in answer.refused.most_common(EXPLAINED):
        yield f"refused by the trainer ({times} times): {sentence}"


def _too_large(layout: PlannedLayout, answer: PlanResult) -> str:
    fullest = max(layout.memory, key=lambda stage: stage.total)
    part = max(MEMORY_HEADINGS, key=lambda name: getattr(fullest, name))
    return (
        f"{layout.name} takes {layout.bytes / GB:.1f} GB of {answer.usable / GB:.1f}, most of it "
        f"{part.replace('_', ' ')} ({getattr(fullest, part) / GB:.1f} GB)"
    )


def _nothing_fits(answer: PlanResult) -> Iterator[str]:
    yield f"no layout fits {answer.gpus} × {answer.usable / GB:.1f} GB. The nearest:"
    for each in answer.too_large[:3]:
        yield f"  {_too_large(each, answer)}"
    least = answer.too_large[0]
    more = 2 ** max((int(answer.gpus * least.bytes / answer.usable) - 1).bit_length(), 1)
    yield (
        f"It would take about {least.bytes / GB:.0f} GB a GPU, or about {more} of these GPUs; a shorter "
        "--seq-length and a smaller --global-batch-size take less, as do adapters (lora.rank)"
    )


def plan_json(answer: PlanResult, tokens: float | None = None, price: float | None = None) -> dict[str, Any]:
    """The answer as plain values: seconds, bytes, shares 0 to 1."""
    return {
        "gpus": answer.gpus,
        "gpus_per_node": answer.gpus_per_node,
        "seq_length": answer.config.data.seq_length,
        "global_batch_size": answer.config.train.global_batch_size,
        "device": answer.rates.device,
        "rates": answer.rates.source,
        "usable_bytes": int(answer.usable),
        "tried": answer.tried,
        "fitting": answer.fitting,
        "best": [layout_json(each, answer, tokens, price) for each in answer.best],
        "too_large": [
            {"name": each.name, "settings": changed(each), "bytes": each.bytes} for each in answer.too_large
        ],
        "refused": dict(answer.refused.most_common(20)),
    }


def layout_json(
    layout: PlannedLayout, answer: PlanResult, tokens: float | None = None, price: float | None = None
) -> dict[str, Any]:
    found = {
        "name": layout.name,
        "settings": changed(layout),
        "fits": layout.fits,
        "bytes": layout.bytes,
        "memory": [asdict(stage) for stage in layout.memory],
        "seconds": layout.time.seconds,
        "parts": layout.time.parts,
        "bubble": layout.time.bubble,
        "exposed": layout.time.exposed,
        "tokens_per_second_per_device": layout.speed.tokens_per_second_per_device,
        "tflops_per_device": layout.speed.tflops_per_device,
        "mfu": layout.speed.mfu,
        "convention": "causal",
    }
    if tokens:
        found["days"] = answer.days(layout, tokens)
        if price:
            found["cost"] = found["days"] * 24 * answer.gpus * price
    return found


def draw_plan(answer: PlanResult, path: str | Path) -> Path:
    """Memory by stage and the pipeline's timeline of the best layout, and bars of the best ones by part."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from megalith.parallel.pipeline.drawing import COLOURS as PASSES

    best, timeline = answer.best[0], answer.best[0].time.timeline
    heights = [1 + 0.4 * len(answer.best), 1 + 0.3 * len(best.memory)]
    heights += [1 + 0.3 * len(timeline.spans)] if timeline is not None else []
    figure = Figure(figsize=(12, sum(heights) + 0.5), dpi=110, layout="constrained")
    figure.suptitle(f"the best: {best.name}", fontsize=10, color="#343a40")
    axes = list(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
    bars, memory = axes[0], axes[1]
    places = range(len(answer.best))
    _stack(bars, places, {name: [1e3 * each.time.parts[name] for each in answer.best] for name in PARTS})
    bars.set_yticks(places, [fill(each.name, 50) for each in answer.best], fontsize=7)
    parts = {
        MEMORY_HEADINGS[part]: [getattr(stage, part) / GB for stage in best.memory]
        for part in MEMORY_HEADINGS
    }
    _stack(memory, range(len(best.memory)), parts)
    memory.axvline(answer.usable / GB, color="#c2255c", linewidth=1.2, linestyle="--")
    memory.set_yticks(range(len(best.memory)), [f"stage {n}" for n in range(len(best.memory))], fontsize=7)
    titles = [
        (bars, "ms a step, by part"),
        (memory, "GB a GPU by stage (dashed: what a GPU has)"),
    ]
    if timeline is not None:
        for rank, spans in enumerate(timeline.spans):
            for kind, colour in PASSES.items():
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
        each.set_title(title, loc="left", fontsize=10, color="#343a40")
        each.tick_params(labelsize=7, colors="#495057", length=0)
        for side in ("top", "right", "left"):
            each.spines[side].set_visible(False)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as partial:
        FigureCanvasAgg(figure).print_png(str(partial))
    return path


def _stack(axes: Any, places: range, parts: dict[str, list[float]]) -> None:
    start = [0.0] * len(places)
    for colour, (name, values) in zip(COLOURS, parts.items()):
        if not any(values):
            continue
        axes.barh(places, values, 0.75, start, color=colour, label=name)
        start = [a + b for a, b in zip(start, values)]
    axes.invert_yaxis()
    axes.legend(
        loc="lower right", bbox_to_anchor=(1, 1), ncols=5, frameon=False, fontsize=7, borderaxespad=0.2
    )


def goodput_table(found: Sequence[Goodput]) -> str:
    """A row a size of the job."""
    headings = (
        "GPUs",
        "a failure each",
        "save each",
        "trains",
        "restart",
        "checkpoint",
        "files",
        "saved in",
        "manifest",
    )
    table = plain_table(*headings, left=0)
    for each in found:
        table.add_row(
            f"{each.gpus:,}",
            _time(each.between_failures),
            _time(each.interval),
            f"{each.share:.2%}",
            _time(each.restart),
            f"{each.checkpoint_bytes / GB:,.0f} GB",
            f"{each.files:,}",
            _time(each.save),
            f"{each.manifest_bytes / 1e6:.0f} MB",
        )
    return render(table)


def _time(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
