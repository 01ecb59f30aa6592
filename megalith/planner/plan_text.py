"""A plan as text and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from textwrap import fill
from typing import Any

from megalith.planner.goodput import Goodput
from megalith.planner.layout_text import MEMORY_HEADINGS
from megalith.planner.plan_result import PlannedLayout, PlanResult, changed
from megalith.planner.step_time import PARTS, caution
from megalith.tables import (
    columns,
    format_amount,
    format_bytes,
    format_si,
    memory_unit,
    plain_table,
    render,
    render_lines,
    wrap_paragraph,
)

GB = 1e9
MAX_EXPLANATIONS = 5


def plan_text(answer: PlanResult, tokens: float | None, price: float | None, explain: bool = False) -> str:
    """Return the plan as text.

    Args:
        answer: result of `plan`.
        tokens: tokens to train on; adds a column with the days.
        price: price of a GPU hour; adds a column with the cost.
        explain: also explain slower, too large and rejected layouts.
    """
    config, rates = answer.config, answer.rates
    batch, seq = config.train.global_batch_size, config.data.seq_length
    precision = "FP8" if config.train.fp8_format else config.train.precision
    model = config.model.preset or config.model.init_from or "the model"
    tried = "One layout" if answer.tried == 1 else f"{answer.tried:,} layouts"
    room = f"{answer.fitting:,} fit in {answer.usable / GB:.0f} GB per GPU"
    sequences = "one sequence" if batch == 1 else f"{batch:,} sequences"
    parts = [
        wrap_paragraph(
            f"{model} on {answer.gpus:,} {rates.device}, {answer.gpus_per_node} per node: "
            f"{sequences} of {seq:,} tokens per step, {precision}. {tried} tried, {room}. Rates: "
            f"{rates.source}."
        )
    ]
    if not answer.best:
        return "\n".join([*parts, *map(wrap_paragraph, _no_layout_fits(answer))])
    parts += [best_table(answer, tokens, price), wrap_paragraph(MFU_NOTE)]
    optim = answer.best[0].config.optim
    if optim.reduces_moments and not config.optim.reduces_moments:
        parts += [wrap_paragraph(MOMENTS_NOTE.format(optim.exp_avg_dtype))]
    parts += ["", layout_details(answer.best[0])]
    if explain:
        parts += ["", *map(wrap_paragraph, explanations(answer))]
    return "\n".join(parts)


MFU_NOTE = (
    "MFU counts causal attention (half of the attention matrix). Memory is an estimate for the fullest GPU."
)
MOMENTS_NOTE = (
    "note: nothing fits with fp32 moments on the GPUs. In {} the optimizer's updates differ; see "
    "optim.exp_avg_dtype"
)


def best_table(answer: PlanResult, tokens: float | None, price: float | None) -> str:
    """Format a table with one layout per row: its figures, then its name."""
    headings = ["", "ms per step", "tokens/s/GPU", "MFU", "GB", "bubble", "exposed"]
    headings += (["days"] if tokens else []) + (["cost"] if tokens and price else [])
    table = plain_table(*headings, left=0)
    for number, each in enumerate(answer.best, 1):
        row = [str(number), *layout_cells(each)]
        if tokens:
            days = answer.days(each, tokens)
            row += [f"{days:,.1f}"] + ([format_si(days * 24 * answer.gpus * price)] if price else [])
        table.add_row(*row)
    heading, rows = render_lines(table)
    indent = " " * (len(str(len(rows))) + 3)
    names = [
        fill(each.name, columns(), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        for each in answer.best
    ]
    return "\n".join([*heading, *(line for pair in zip(rows, names) for line in pair)])


def layout_cells(layout: PlannedLayout) -> list[str]:
    """Return a layout's time, speed, MFU, memory, bubble and exposed communication as text."""
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
    """Format a layout's time per operation and memory per stage."""
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
            wrap_paragraph(f"{layout.name}: {1000.0 * layout.time.seconds:,.1f} ms per step: {shares}"),
            wrap_paragraph("(tensor, context, expert, data: exposed communication)"),
            *([wrap_paragraph(f"note: {note}")] if note else []),
            render(memory),
            *_snapshot_memory(layout),
        ]
    )


def _snapshot_memory(layout: PlannedLayout) -> list[str]:
    """Return a line about the host memory of snapshots if the run takes any."""
    if layout.config.checkpoint.memory_interval is None:
        return []
    most = max(stage.snapshots for stage in layout.memory)
    return [f"host memory for snapshots (checkpoint.memory_interval): at most {format_bytes(most)} per rank"]


def explanations(answer: PlanResult) -> Iterator[str]:
    """Yield texts that explain why the runners-up are slower, why other layouts do not fit, and which layouts the
    trainer rejects.
    """
    best = answer.best[0]
    for number, each in enumerate(answer.best[1:], 2):
        added = {name: each.time.parts[name] - best.time.parts[name] for name in PARTS}
        worst = sorted(added, key=added.__getitem__, reverse=True)[:2]
        reasons = ", ".join(f"{name} +{1e3 * added[name]:,.0f} ms" for name in worst if added[name] > 0)
        yield f"{number}. {each.time.seconds / best.time.seconds - 1:+.1%}: {reasons or 'as fast'} ({each.name})"
    for each in answer.too_large[:MAX_EXPLANATIONS]:
        yield f"does not fit: {_too_large(each, answer)}"
    for sentence, times in answer.refused.most_common(MAX_EXPLANATIONS):
        yield f"refused by the trainer ({times} times): {sentence}"


def _too_large(layout: PlannedLayout, answer: PlanResult) -> str:
    fullest = max(layout.memory, key=lambda stage: stage.total)
    part = max(MEMORY_HEADINGS, key=lambda name: getattr(fullest, name))
    return (
        f"{layout.name} takes {layout.bytes / GB:.1f} GB of {answer.usable / GB:.1f}, most of it "
        f"{part.replace('_', ' ')} ({getattr(fullest, part) / GB:.1f} GB)"
    )


def _no_layout_fits(answer: PlanResult) -> Iterator[str]:
    yield f"no layout fits {answer.gpus} × {answer.usable / GB:.1f} GB. The nearest:"
    for each in answer.too_large[:3]:
        yield f"  {_too_large(each, answer)}"
    least = answer.too_large[0]
    more = 2 ** max((int(answer.gpus * least.bytes / answer.usable) - 1).bit_length(), 1)
    yield (
        f"It would take about {least.bytes / GB:.0f} GB per GPU, or about {more} of these GPUs. A "
        "shorter --seq-length, a smaller --global-batch-size and adapters (lora.rank) need less "
        "memory"
    )


def plan_json(answer: PlanResult, tokens: float | None = None, price: float | None = None) -> dict[str, Any]:
    """Return the plan as JSON values, in seconds, bytes and fractions from 0 to 1."""
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
    values = {
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
        values["days"] = answer.days(layout, tokens)
        if price:
            values["cost"] = values["days"] * 24 * answer.gpus * price
    return values


def goodput_table(estimates: Sequence[Goodput]) -> str:
    """Format a table of goodput with one row per job size."""
    headings = (
        "GPUs",
        "MTBF",
        "save every",
        "goodput",
        "with memory",
        "restart",
        "checkpoint",
        "saved in",
        "manifest",
    )
    table = plain_table(*headings, left=0)
    for each in estimates:
        table.add_row(
            f"{each.gpus:,}",
            _time(each.between_failures),
            _time(each.interval),
            f"{each.share:.2%}",
            f"{each.share_with_memory:.2%}",
            _time(each.restart),
            f"{each.checkpoint_bytes / GB:,.0f} GB",
            _time(each.save),
            f"{each.manifest_bytes / 1e6:.0f} MB",
        )
    return render(table)


def _time(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
