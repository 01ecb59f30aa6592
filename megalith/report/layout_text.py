"""A run's layout on the screen: where each rank stands, what each stage has, and what that costs. 100 columns wide."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from textwrap import fill

from rich import box
from rich.console import Console
from rich.table import Table

from megalith.parallel.pipeline.stages import schedule_kind
from megalith.planner.layout import Layout, StageLayout
from megalith.report.console import si

WIDTH = 100
MOST_ROWS = 16  # of ranks; a larger world is shown by ranges
UNEVEN = 1.05  # the largest stage against the smallest


def layout_text(layout: Layout, hosts: Sequence[str] | None = None) -> str:
    """What is known of a run over several ranks before its first step. `hosts`: each rank's machine."""
    size = layout.size
    parts = [
        f"layout: {layout.world_size} ranks = pipeline {size.pp} × data {size.dp} × context {size.cp} × tensor "
        f"{size.tp}",
        render(ranks_table(layout, hosts)),
        "expected of each stage, memory on one of its devices (E: embedding, L: head and loss)",
        render(stages_table(layout)),
    ]
    if uneven := why_uneven(layout):
        parts.append(paragraph(uneven))
    if len(layout.stages) > 1:
        parts.append(paragraph(bubble_text(layout)))
    if layout.transfers:
        parts += ["sent by a device in a step, at most", render(transfers_table(layout))]
    return "\n".join(parts)


def paragraph(text: str) -> str:
    """The text in lines of WIDTH."""
    return fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def render(table: Table) -> str:
    """The table as plain lines, none longer than WIDTH."""
    console = Console(width=WIDTH, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def plain_table(*headings: str, left: int = 1) -> Table:
    """A table without borders; the first `left` columns are words, the others numbers."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < left else "right", overflow="fold")
    return table


def ranks_table(layout: Layout, hosts: Sequence[str] | None) -> Table:
    """Rank → coordinates, with stage and machine."""
    headings = ["ranks", "pp", "dp", "cp", "tp", "layers"] + (["machine"] if hosts else [])
    table = plain_table(*headings, left=len(headings))
    for ranks in rank_ranges(layout):
        places = [layout.coordinates[rank] for rank in ranks]
        row = [span(ranks), *(span([getattr(p, name) for p in places]) for name in ("pp", "dp", "cp", "tp"))]
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
    step = next((s for s in together if world // s <= MOST_ROWS), world // size.pp)
    return (range(first, first + step) for first in range(0, world, step))


def span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}–{high}"


def layers_text(stage: StageLayout) -> str:
    """The stage's layers and what it has besides: `E 0–4, 10–14 L`, as in pipeline_model_parallel_layout."""
    layers = ", ".join(span(chunk.layers) if chunk.layers else "none" for chunk in stage.chunks)
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
            si(stage.parameters, 4),
            str(stage.in_flight),
            *(amount(part, size) for part in [*parts, stage.memory.total]),
        )
    return table


def memory_unit(totals: Iterable[int]) -> tuple[str, float]:
    """GB, or MB where nothing is a GB large; in bytes."""
    return ("GB", 1e9) if max(totals) >= 1e9 else ("MB", 1e6)


def amount(size: float, unit: float) -> str:
    return f"{size / unit:.{2 if size < 9.995 * unit else 1 if size < 99.95 * unit else 0}f}"


def why_uneven(layout: Layout) -> str | None:
    """The sentence that says why one stage takes more memory than another; None where they are alike."""
    most = max(layout.stages, key=lambda stage: stage.memory.total)
    least = min(layout.stages, key=lambda stage: stage.memory.total)
    if most.memory.total <= UNEVEN * least.memory.total:
        return None
    unit, size = memory_unit(stage.memory.total for stage in layout.stages)
    differences = sorted(_reasons(layout, most, least), key=lambda item: -abs(item[0]))
    floor = 0.01 * most.memory.total
    more = [f"{words} (+{amount(by, size)} {unit})" for by, words in differences if by > floor]
    less = [f"{words} (−{amount(-by, size)} {unit})" for by, words in differences if by < -floor]
    text = (
        f"memory is uneven: stage {most.number} takes {amount(most.memory.total - least.memory.total, size)} {unit} "
        f"more than stage {least.number}: {', '.join(more)}"
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
    gathered = () if copies else ("compute_copy",)
    state = ", ".join(
        [f"state of {si(most.parameters)} parameters against {si(least.parameters)}", *_ends(most, least)]
    )
    return [
        (
            more("activations", *copies),
            f"{kept}, {most.in_flight}{chunks} in flight against {least.in_flight}",
        ),
        (more("weights", "gradients", "optimizer", *gathered), state),
        (more("loss"), "logits and the head's gradient"),
    ]


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
        sent = (
            f"{amount(transfer.bytes, 1e9)} GB"
            if transfer.bytes >= 1e9
            else f"{amount(transfer.bytes, 1e6)} MB"
        )
        table.add_row(transfer.axis, str(transfer.size), sent, transfer.what)
    return table
