"""Formats a run's layout: ranks, stages with expected memory, the bubble, and the bytes that each axis sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from megalith.parallel.pipeline.stages import schedule_kind
from megalith.planner.layout import Layout, StageLayout
from megalith.tables import (
    counted,
    format_amount,
    format_si,
    memory_unit,
    plain_table,
    render,
    wrap_paragraph,
)

MAX_ROWS = 16  # of the ranks table; larger worlds are shown by ranges of ranks
UNEVEN = 1.05  # memory of the largest stage over the smallest


def layout_text(layout: Layout, hosts: Sequence[str] | None = None) -> str:
    """Describe a layout before the first step. `hosts`: the machine of each rank."""
    size = layout.size
    parts = [
        wrap_paragraph(
            f"layout: {counted(layout.world_size, 'rank')} = pipeline {size.pp} × data {size.dp} × context "
            f"{size.cp} × tensor {size.tp}"
        ),
        render(ranks_table(layout, hosts)),
        wrap_paragraph(
            "expected for each stage: memory on one of its devices (E: embedding, L: head and loss)"
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
    """Return a table of the ranks' coordinates, layers and machines."""
    headings = ["ranks", "pp", "dp", "cp", "tp", "layers"] + (["machine"] if hosts else [])
    table = plain_table(*headings, left=len(headings))
    for ranks in rank_ranges(layout):
        coordinates = [layout.coordinates[rank] for rank in ranks]
        row = [
            format_range(ranks),
            *(
                format_range([getattr(each, name) for each in coordinates])
                for name in ("pp", "dp", "cp", "tp")
            ),
        ]
        row.append(layers_text(layout.stage_of(ranks[0])))
        if hosts:
            names = list(dict.fromkeys(hosts[rank] for rank in ranks))
            row.append(names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}")
        table.add_row(*row)
    return table


def rank_ranges(layout: Layout) -> Iterator[range]:
    """Return single ranks, or the smallest ranges along the mesh axes that need at most MAX_ROWS rows."""
    size, world = layout.size, layout.world_size
    lengths = (1, size.tp, size.cp * size.tp)
    step = next((s for s in lengths if world // s <= MAX_ROWS), world // size.pp)
    return (range(first, first + step) for first in range(0, world, step))


def format_range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}–{high}"


def layers_text(stage: StageLayout) -> str:
    """Return the layers of a stage, with E and L as in pipeline_model_parallel_layout: `E 0–4, 10–14 L`."""
    layers = ", ".join(format_range(chunk.layers) if chunk.layers else "none" for chunk in stage.chunks)
    return f"{'E ' if stage.embedding else ''}{layers}{' L' if stage.head else ''}"


# Field of MemoryEstimate → heading.
MEMORY_HEADINGS = {
    "weights": "weights",
    "compute_copy": "copy",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ.",
    "loss": "loss",
}


def stages_table(layout: Layout) -> Table:
    """Return a table of the stages' layers, parameters and expected memory per device."""
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
    """Return a sentence that explains why one stage needs more memory than another, or None if they need about the
    same.
    """
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
    """Return reasons why one stage needs more memory: pairs of the additional bytes of `most` over `least`, and a
    text.
    """

    def more(*names: str) -> int:
        return sum(getattr(most.memory, name) - getattr(least.memory, name) for name in names)

    chunks = "" if len(most.chunks) == 1 else " chunks"
    # Without FSDP2 autograd holds cast weights for each micro-batch. With it, the gathered copy is part of the state.
    copies = () if layout.gathers else ("compute_copy",)
    saved = "activations and cast weights" if copies and most.memory.compute_copy else "activations"
    count = f"{most.in_flight}{chunks} in flight against {least.in_flight}"
    if most.in_flight == least.in_flight:
        count = f"of {_layers(most)} layers against {_layers(least)}"
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
            f"{saved}, {count}",
        ),
        (more("weights", "gradients", "optimizer", *gathered), state),
        (more("loss"), "logits and the head's gradient"),
    ]


def _layers(stage: StageLayout) -> int:
    return sum(len(chunk.layers) for chunk in stage.chunks)


def _ends(most: StageLayout, least: StageLayout) -> list[str]:
    differences = []
    for name, has, other in (
        ("the embedding", most.embedding, least.embedding),
        ("the head", most.head, least.head),
    ):
        if has != other:
            differences.append(f"{'with' if has else 'without'} {name}")
    return differences


def bubble_text(layout: Layout) -> str:
    """Return a sentence about the schedule and its expected bubble."""
    parallel = layout.config.parallel
    text = (
        f"pipeline: {schedule_kind(parallel)}, {counted(layout.micro_batches, 'micro-batch')} per step: "
        f"ranks are expected to wait {layout.bubble:.1%} of the time (the bubble)"
    )
    if abs(layout.weighed_bubble - layout.bubble) > 0.005:
        text += f", {layout.weighed_bubble:.1%} with stages weighted by their FLOPs"
    return text


def transfers_table(layout: Layout) -> Table:
    """Return a table of the bytes that each axis sends."""
    table = plain_table("axis", "ranks", "sent per step", "what moves", left=1)
    table.columns[-1].justify = "left"
    for transfer in layout.transfers:
        unit, size = memory_unit([transfer.bytes])
        sent = f"{format_amount(transfer.bytes, size)} {unit}"
        table.add_row(transfer.axis, str(transfer.size), sent, transfer.what)
    return table
