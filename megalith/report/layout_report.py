"""A run over several ranks, explained as it goes: its layout at the start, one measured step, the peak at the end.

Of a pipeline the step after the measured one, which no profiler slows down, is kept as a timeline, for
`megalith pipeline show --measured`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from rich.table import Table

from megalith.comm.collectives import gather_json
from megalith.config import LogConfig
from megalith.parallel.mesh import Mesh
from megalith.parallel.pipeline.executor import Pipeline
from megalith.parallel.pipeline.timeline import write_timeline
from megalith.planner.layout import Layout
from megalith.report.layout_text import (
    amount,
    memory_unit,
    paragraph,
    plain_table,
    rank_ranges,
    render,
    span,
)
from megalith.report.measured_step import StepMeasure, StepTimes, peak_memory, with_last_wait

WARM_UP = 4  # steps before the measured one: the first ones compile and fill the allocator's pools


@dataclass(frozen=True)
class RankFigures:
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
        self.measured_step = measured_step(layout.config.log, first_step) if layout.world_size > 1 else None
        self._layout, self._mesh, self._device, self._note = layout, mesh, device, note
        self._measure: StepMeasure | None = None
        self._pipeline = pipeline
        self._told = 0  # the peak that was shown

    def before_step(self, step: int) -> None:
        if self._pipeline is not None:
            self._pipeline.record = step - 1 == self.measured_step
        if step == self.measured_step:
            self._measure = StepMeasure(self._device, self._mesh.world)
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
                    f"timeline of step {self.measured_step + 1}: {where}; bubble {bubble} from its first action to "
                    "its last"
                )
        if self._measure is None:
            return
        own = [peak_memory(self._device), *astuple(self._measure.stop())]
        self._measure = None
        told = gather_json(own, self._mesh.world)
        figures = [RankFigures(peak, StepTimes(*times)) for peak, *times in told]
        self._told = max(each.peak for each in figures)
        self._note(measured_text(self._layout, figures, self.measured_step, self._device.type))

    def end(self) -> None:
        """Tells the peak of the whole run, where it has grown since a step was measured."""
        if not self._told:
            return
        peaks = gather_json(peak_memory(self._device), self._mesh.world)
        most = max(peaks)
        if most > 1.01 * self._told:
            unit, size = memory_unit(peaks)
            self._note(
                f"peak memory of the run: {amount(most, size)} {unit} on rank {peaks.index(most)}, "
                f"{amount(min(peaks), size)} {unit} on rank {peaks.index(min(peaks))}"
            )


def measured_step(log: LogConfig, first_step: int) -> int | None:
    """Which step is measured: never one that torch's profiler traces for `log.profile`. None: none."""
    if not log.layout_report:
        return None
    step = first_step + WARM_UP
    traced = log.profile and log.profile_step_start <= step <= log.profile_step_end
    return log.profile_step_end + 1 if traced else step


def measured_text(layout: Layout, figures: Sequence[RankFigures], step: int, device_type: str) -> str:
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
    return "\n".join([title, render(measured_table(layout, figures, device_type, unit)), paragraph(text)])


def measured_table(layout: Layout, figures: Sequence[RankFigures], device_type: str, unit: float) -> Table:
    """Memory and times by rank; of a range of ranks the most memory, and the means of their times."""
    times = ["step", "compute", "communication", "bubble"] + (["idle"] if device_type == "cuda" else [])
    headings = ["step", "compute", "exposed comm", "bubble", "idle"][: len(times)]
    table = plain_table("ranks", "pp", "dp", "cp", "tp", "expected", "measured", *headings, left=5)
    for ranks in rank_ranges(layout):
        places = [layout.coordinates[rank] for rank in ranks]
        own = [figures[rank] for rank in ranks]
        table.add_row(
            span(ranks),
            *(span([getattr(place, axis) for place in places]) for axis in ("pp", "dp", "cp", "tp")),
            amount(layout.stage_of(ranks[0]).memory.total, unit),
            amount(max(each.peak for each in own), unit),
            *(f"{sum(getattr(each.times, name) for each in own) / len(own):.1f}" for name in times),
        )
    return table


def _with_bubbles(layout: Layout, figures: Sequence[RankFigures]) -> list[RankFigures]:
    """The figures with `with_last_wait` of each pipeline."""
    result = list(figures)
    spacing = layout.world_size // layout.size.pp
    for first in range(spacing):
        ranks = range(first, layout.world_size, spacing)
        for rank, times in zip(ranks, with_last_wait([figures[rank].times for rank in ranks])):
            result[rank] = RankFigures(figures[rank].peak, times)
    return result
