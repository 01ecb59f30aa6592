"""A run's layout as text, 100 columns wide: ranks and stages at the start, a measured step, the peak memory at the end.

For a pipeline the step after the measured one, which no profiler slows down, is recorded as a timeline, for
`megalith pipeline show --measured`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from textwrap import fill

import torch
from rich import box
from rich.table import Table

from megalith.comm.collectives import gather_json
from megalith.config import LogConfig
from megalith.errors import LINES, printable
from megalith.io import replace_file
from megalith.parallel.mesh import Mesh
from megalith.parallel.pipeline.executor import Pipeline
from megalith.parallel.pipeline.stages import schedule_kind
from megalith.parallel.pipeline.timeline import write_timeline
from megalith.planner.layout import Layout, StageLayout
from megalith.report.console import columns, render, si
from megalith.report.measured_step import StepMeasurement, StepTimes, move_final_wait_to_bubble, peak_memory
from megalith.report.metrics import MEASURED_FILE

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


def wrap_paragraph(text: str) -> str:
    """The text in lines of WIDTH, on a narrower terminal of its columns."""
    return fill(printable(text, LINES), columns(), subsequent_indent="  ", break_on_hyphens=False)


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
            si(stage.parameters, 4),
            str(stage.in_flight),
            *(format_amount(part, size) for part in [*parts, stage.memory.total]),
        )
    return table


def memory_unit(totals: Iterable[int]) -> tuple[str, float]:
    """GB, or MB where nothing is a GB large; in bytes."""
    return ("GB", 1e9) if max(totals) >= 1e9 else ("MB", 1e6)


def format_amount(size: float, unit: float) -> str:
    return f"{size / unit:.{2 if size < 9.995 * unit else 1 if size < 99.95 * unit else 0}f}"


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
        [f"state of {si(most.parameters)} parameters against {si(least.parameters)}", *_ends(most, least)]
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


WARM_UP = 4  # steps before the measured one: the first ones compile and fill the allocator's pools


@dataclass(frozen=True)
class RankMeasurement:
    """What a rank has measured."""

    peak: int
    """Bytes."""
    times: StepTimes


class LayoutReport:
    """Measures one step and the peak of memory, on every rank; `note` prints on the first and is silent elsewhere.

    Profiling costs the step some host time and, before and after it, up to seconds to start and read the profiler.
    """

    def __init__(
        self,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        first_step: int,
        note: Callable[[str], None],
        pipeline: Pipeline | None = None,
    ):
        """`first_step` is the number of the first step that this process makes."""
        self.step_to_measure = (
            step_to_measure(layout.config.log, first_step) if layout.world_size > 1 else None
        )
        self._layout, self._mesh, self._device, self._note = layout, mesh, device, note
        self._measure: StepMeasurement | None = None
        self._pipeline = pipeline
        self._told = 0  # the peak that was shown

    def before_step(self, step: int) -> None:
        if self._pipeline is not None:
            self._pipeline.record = step - 1 == self.step_to_measure
        if step == self.step_to_measure:
            self._measure = StepMeasurement(self._device, self._mesh.world)
            self._measure.start()

    def after_step(self) -> None:
        if self._pipeline is not None and self._pipeline.record:
            timeline = self._pipeline.gather_timeline()
            if self._mesh.world.rank == 0:
                folder, bubble = Path(self._layout.config.train.output_dir), f"{timeline.bubble:.1%}"
                try:
                    where = str(write_timeline(folder, timeline))
                except OSError as error:
                    where = f"not written ({error.strerror})"
                self._note(
                    f"timeline of step {self.step_to_measure + 1}: {where}; bubble {bubble} from its first action to "
                    "its last"
                )
        if self._measure is None:
            return
        own = [peak_memory(self._device), *astuple(self._measure.stop())]
        self._measure = None
        told = gather_json(own, self._mesh.world)
        figures = [RankMeasurement(peak, StepTimes(*times)) for peak, *times in told]
        self._told = max(each.peak for each in figures)
        self._note(measured_text(self._layout, figures, self.step_to_measure, self._device.type))
        if self._mesh.world.rank == 0:
            folder = Path(self._layout.config.train.output_dir)
            ranks = [
                {"peak": each.peak, **asdict(each.times)} for each in _with_bubbles(self._layout, figures)
            ]
            with suppress(OSError):  # it was printed
                replace_file(
                    folder / MEASURED_FILE, json.dumps({"step": self.step_to_measure, "ranks": ranks})
                )

    def end(self) -> None:
        """Tells the peak of the whole run, where it has grown since a step was measured."""
        if not self._told:
            return
        peaks = gather_json(peak_memory(self._device), self._mesh.world)
        most = max(peaks)
        if most > 1.01 * self._told:
            unit, size = memory_unit(peaks)
            self._note(
                f"peak memory of the run: {format_amount(most, size)} {unit} on rank {peaks.index(most)}, "
                f"{format_amount(min(peaks), size)} {unit} on rank {peaks.index(min(peaks))}"
            )


def step_to_measure(log: LogConfig, first_step: int) -> int | None:
    """Which step is measured: never one that torch's profiler traces for `log.profile`. None: none."""
    if not log.layout_report:
        return None
    step = first_step + WARM_UP
    traced = log.profile and log.profile_step_start <= step <= log.profile_step_end
    return log.profile_step_end + 1 if traced else step


def measured_text(layout: Layout, figures: Sequence[RankMeasurement], step: int, device_type: str) -> str:
    """Each rank's memory and times, and what they say of the layout. `figures`: by rank."""
    figures = _with_bubbles(layout, figures)
    whole = sum(each.times.step for each in figures)
    mean = {
        name: sum(getattr(each.times, name) for each in figures) / whole
        for name in ("compute", "communication", "bubble", "idle")
    }
    text = f"of the step, all ranks together: compute {mean['compute']:.1%}, exposed communication "
    text += f"{mean['communication']:.1%}"
    if len(layout.stages) > 1:
        text += f", bubble {mean['bubble']:.1%} (expected {layout.bubble:.1%} for equal stages"
        text += f", {layout.weighed_bubble:.1%} by their FLOPs)"
    if device_type == "cuda":
        text += f", idle {mean['idle']:.1%}"
    memory = "the GPU's allocator" if device_type == "cuda" else "the process, libraries and all"
    name, unit = memory_unit([each.peak for each in figures])
    title = f"measured in step {step}, under the profiler: peak of {memory}, {name}; times in ms"
    return "\n".join(
        [title, render(measured_table(layout, figures, device_type, unit)), wrap_paragraph(text)]
    )


def measured_table(
    layout: Layout, figures: Sequence[RankMeasurement], device_type: str, unit: float
) -> Table:
    """Memory and times by rank; of a range of ranks the most memory, and the means of their times."""
    times = ["step", "compute", "communication", "bubble"] + (["idle"] if device_type == "cuda" else [])
    headings = ["step", "compute", "exposed comm", "bubble", "idle"][: len(times)]
    table = plain_table("ranks", "pp", "dp", "cp", "tp", "expected", "measured", *headings, left=5)
    for ranks in rank_ranges(layout):
        places = [layout.coordinates[rank] for rank in ranks]
        own = [figures[rank] for rank in ranks]
        table.add_row(
            format_range(ranks),
            *(format_range([getattr(place, axis) for place in places]) for axis in ("pp", "dp", "cp", "tp")),
            format_amount(layout.stage_of(ranks[0]).memory.total, unit),
            format_amount(max(each.peak for each in own), unit),
            *(f"{sum(getattr(each.times, name) for each in own) / len(own):.1f}" for name in times),
        )
    return table


def _with_bubbles(layout: Layout, figures: Sequence[RankMeasurement]) -> list[RankMeasurement]:
    """The figures with `move_final_wait_to_bubble` of each pipeline."""
    result = list(figures)
    spacing = layout.world_size // layout.size.pp
    for first in range(spacing):
        ranks = range(first, layout.world_size, spacing)
        for rank, times in zip(ranks, move_final_wait_to_bubble([figures[rank].times for rank in ranks])):
            result[rank] = RankMeasurement(figures[rank].peak, times)
    return result
