"""The layout report: each rank's measured times and memory in one step, and the peak memory at the end of the run.

For a pipeline, the step after the measured one is recorded as a timeline for `megalith pipeline show --measured`; no
profiler slows it down.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import torch
from rich.table import Table

from megalith.comm.collectives import gather_json
from megalith.config import LogConfig
from megalith.io import replace_file
from megalith.parallel.mesh import Mesh
from megalith.parallel.pipeline.executor import Pipeline
from megalith.parallel.pipeline.timeline import write_timeline
from megalith.planner.layout import Layout
from megalith.planner.layout_text import format_range, rank_ranges
from megalith.report.measured_step import StepMeasurement, StepTimes, move_final_wait_to_bubble, peak_memory
from megalith.report.metrics import MEASURED_FILE
from megalith.tables import format_amount, memory_unit, plain_table, render, wrap_paragraph

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
