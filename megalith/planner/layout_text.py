"""A run's layout as text: ranks, stages with their expected memory, the bubble, and what each axis sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from megalith.parallel.pipeline.stages import schedule_kind
from megalith.planner.layout import Layout, StageLayout
from megalith.tables import format_amount, format_si, memory_unit, plain_table, render, wrap_paragraph

MAX_ROWS = 16  # of ranks; a larger world is shown by ranges
UNEVEN = 1.05  # the largest stage against the smallest


def layout_text(layout: Layout, hosts: Sequence[str] | None = None) -> str:
    """What is known of a run over several ranks before its first step. `hosts`: each rank's machine."""
    size = layout.size
    parts = [
        wrap_paragraph(
            f"layout: {layout.world_size} ranks = pipeline {size.pp} × data {size.dp} × context {size.cp} × tensor "
            f"{size.tp}"
        ),
        render(ranks_table(layout, hosts)),
        wrap_paragraph(
            "expected of each stage, memory on one of its devices (E: embedding, L: head and loss)"
        ),
        render(stages_table(layout)),
    ]
    if uneven := explain_imbalance(layout):
        parts.append(wrap_paragraph(uneven))
    if len(layout.stages) > 1:
        parts.append(wrap_paragraph(bubble_text(layout)))
    if layout.transfers:
        parts += ["sent by a device in a step, at most", render(transfers_table(layout))]
    return "\n".join(parts)


def ranks_table(layout: Layout, hosts: Sequence[str] | None) -> Table:
    """Rank → coordinates, with stage and machine."""
    headings = ["ranks", "pp", "dp", "cp", "tp", "layers"] + (["machine"] if hosts else [])
    table = plain_table(*headings, left=len(headings))
    for ranks in rank_ranges(layout):
        places = [layout.coordinates[rank] for rank in ranks]
        row = [
            format_range(ranks),
            *(format_range([getattr(p, name) for p in places]) for name in ("pp", "dp", "cp", "tp")),
        ]
        row.append(layers_text(layout.stage_of(ranks[0])))
        if hosts:
            names = list(dict.fromkeys(hosts[rank] for rank in ranks))
            row.append(names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}")
        table.add_row(*row)
    return table


def rank_ranges(layout: Layout) -> Iterator[range]:
    """The ranks one by one, or in the finest ranges along the axes that make no more than MOST_ROWS rows."""
    size, world = layout.size, layout.world_size
    together = (1, size.tp, size.cp * size.tp)
    step = next((s for s in together if world // s <= MAX_ROWS), world // size.pp)
    return (range(first, first + step) for first in range(0, world, step))


def format_range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}–{high}"


def layers_text(stage: StageLayout) -> str:
    """The stage's layers and what it has besides: `E 0–4, 10–14 L`, as in pipeline_model_parallel_layout."""
    layers = ", ".join(format_range(chunk.layers) if chunk.layers else "none" for chunk in stage.chunks)
    return f"{'E ' if stage.embedding else ''}{layers}{' L' if stage.head else ''}"


# A heading for each part of a MemoryEstimate.
MEMORY_HEADINGS = {
    "weights": "weights",
    "compute_copy": "copy",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ.",
    "loss": "loss",
}


def stages_table(layout: Layout) -> Table:
    """Stage → layers, parameters and the memory that a device of it is expected to take."""
    unit, size = memory_unit(stage.memory.total for stage in layout.stages)
    table = plain_table(
        "stage",
        "layers",
        "params",
        "in flight",
        *MEMORY_HEADINGS.values(),
        f"total {unit}",
        left=2,
    )
    for stage in layout.stages:
        parts = [getattr(stage.memory, name) for name in MEMORY_HEADINGS]
        table.add_row(
            str(stage.number),
            layers_text(stage),
            format_si(stage.parameters, 4),
            str(stage.in_flight),
            *(format_amount(part, size) for part in [*parts, stage.memory.total]),
        )
    return table


def explain_imbalance(layout: Layout) -> str | None:
    """The sentence that says why one stage takes more memory than another; None where they are alike."""
    most = max(layout.stages, key=lambda stage: stage.memory.total)
    least = min(layout.stages, key=lambda stage: stage.memory.total)
    if most.memory.total <= UNEVEN * least.memory.total:
        return None
    unit, size = memory_unit(stage.memory.total for stage in layout.stages)
    differences = sorted(_reasons(layout, most, least), key=lambda item: -abs(item[0]))
    floor = 0.01 * most.memory.total
    more = [f"{words} (+{format_amount(by, size)} {unit})" for by, words in differences if by > floor]
    less = [f"{words} (−{format_amount(-by, size)} {unit})" for by, words in differences if by < -floor]
    text = (
        f"memory is uneven: stage {most.number} takes "
        f"{format_amount(most.memory.total - least.memory.total, size)} {unit} more than stage {least.number}: "
        f"{', '.join(more)}"
    )
    return f"{text}; but {', '.join(less)}" if less else text


def _reasons(layout: Layout, most: StageLayout, least: StageLayout) -> list[tuple[int, str]]:
    """(bytes that `most` has more, why)."""

    def more(*names: str) -> int:
        return sum(getattr(most.memory, name) - getattr(least.memory, name) for name in names)

    chunks = "" if len(most.chunks) == 1 else " chunks"
    # Without FSDP2 the cast weights go with each micro-batch; with it a gathered copy is part of the state.
    copies = () if layout.gathers else ("compute_copy",)
    kept = "activations and cast weights" if copies and most.memory.compute_copy else "activations"
    held = f"{most.in_flight}{chunks} in flight against {least.in_flight}"
    if most.in_flight == least.in_flight:
        held = f"of {_layers(most)} layers against {_layers(least)}"
    gathered = () if copies else ("compute_copy",)
    state = ", ".join(
        [
            f"state of {format_si(most.parameters)} parameters against {format_si(least.parameters)}",
            *_ends(most, least),
        ]
    )
    return [
        (
            more("activations", *copies),
            f"{kept}, {held}",
        ),
        (more("weights", "gradients", "optimizer", *gathered), state),
        (more("loss"), "logits and the head's gradient"),
    ]


def _layers(stage: StageLayout) -> int:
    return sum(len(chunk.layers) for chunk in stage.chunks)


def _ends(most: StageLayout, least: StageLayout) -> list[str]:
    found = []
    for name, has, other in (
        ("the embedding", most.embedding, least.embedding),
        ("the head", most.head, least.head),
    ):
        if has != other:
            found.append(f"{'with' if has else 'without'} {name}")
    return found


def bubble_text(layout: Layout) -> str:
    """What the schedule makes the ranks wait."""
    parallel = layout.config.parallel
    text = (
        f"pipeline: {schedule_kind(parallel)}, {layout.micro_batches} micro-batches a step: ranks are expected to "
        f"wait {layout.bubble:.1%} of the time (the bubble)"
    )
    if abs(layout.weighed_bubble - layout.bubble) > 0.005:
        text += f", {layout.weighed_bubble:.1%} with stages weighed by their FLOPs"
    return text


def transfers_table(layout: Layout) -> Table:
    """Axis → bytes."""
    table = plain_table("axis", "ranks", "sent a step", "what moves", left=1)
    table.columns[-1].justify = "left"
    for transfer in layout.transfers:
        unit, size = memory_unit([transfer.bytes])
        sent = f"{format_amount(transfer.bytes, size)} {unit}"
        table.add_row(transfer.axis, str(transfer.size), sent, transfer.what)
    return table
