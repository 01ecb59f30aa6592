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

WARM_UP = 4  # steps before the measured one, for compilation and to fill the allocator's pools


@dataclass(frozen=True)
class RankMeasurement:
    """Measurements of one rank."""

    peak: int
    """Peak memory, bytes."""
    times: StepTimes


class LayoutReport:
    """Measures one step and the peak memory on every rank. `note` prints on rank 0 and does nothing elsewhere.

    The profiler adds host time to the measured step, and may take several seconds before and after the step.
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
        """Prepare to measure. `first_step` is the number of the first step of this process."""
        self.step_to_measure = (
            step_to_measure(layout.config.log, first_step) if layout.world_size > 1 else None
        )
        self._layout, self._mesh, self._device, self._note = layout, mesh, device, note
        self._measure: StepMeasurement | None = None
        self._pipeline = pipeline
        self._reported_peak = 0  # bytes

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
        local = [peak_memory(self._device), *astuple(self._measure.stop())]
        self._measure = None
        gathered = gather_json(local, self._mesh.world)
        measurements = [RankMeasurement(peak, StepTimes(*times)) for peak, *times in gathered]
        self._reported_peak = max(each.peak for each in measurements)
        self._note(measured_text(self._layout, measurements, self.step_to_measure, self._device.type))
        if self._mesh.world.rank == 0:
            folder = Path(self._layout.config.train.output_dir)
            ranks = [
                {"peak": each.peak, **asdict(each.times)}
                for each in _with_bubbles(self._layout, measurements)
            ]
            with suppress(OSError):  # the console has it
                replace_file(
                    folder / MEASURED_FILE, json.dumps({"step": self.step_to_measure, "ranks": ranks})
                )

    def end(self) -> None:
        """Print the run's peak memory if it has grown since the measured step."""
        if not self._reported_peak:
            return
        peaks = gather_json(peak_memory(self._device), self._mesh.world)
        most = max(peaks)
        if most > 1.01 * self._reported_peak:
            unit, size = memory_unit(peaks)
            self._note(
                f"peak memory of the run: {format_amount(most, size)} {unit} on rank {peaks.index(most)}, "
                f"{format_amount(min(peaks), size)} {unit} on rank {peaks.index(min(peaks))}"
            )


def step_to_measure(log: LogConfig, first_step: int) -> int | None:
    """Return the step to measure, or None without a layout report. Steps that `log.profile` traces are avoided."""
    if not log.layout_report:
        return None
    step = first_step + WARM_UP
    traced = log.profile and log.profile_step_start <= step <= log.profile_step_end
    return log.profile_step_end + 1 if traced else step


def measured_text(
    layout: Layout, measurements: Sequence[RankMeasurement], step: int, device_type: str
) -> str:
    """Return a table of each rank's memory and times, and their means over all ranks. `measurements`: by rank."""
    measurements = _with_bubbles(layout, measurements)
    total = sum(each.times.step for each in measurements)
    mean = {
        name: sum(getattr(each.times, name) for each in measurements) / total
        for name in ("compute", "communication", "bubble", "idle")
    }
    text = f"of the step, over all ranks: compute {mean['compute']:.1%}, exposed communication "
    text += f"{mean['communication']:.1%}"
    if len(layout.stages) > 1:
        text += f", bubble {mean['bubble']:.1%} (expected {layout.bubble:.1%} for equal stages"
        text += f", {layout.weighed_bubble:.1%} by their FLOPs)"
    if device_type == "cuda":
        text += f", idle {mean['idle']:.1%}"
    memory = "the GPU's allocator" if device_type == "cuda" else "the process, including libraries"
    name, unit = memory_unit([each.peak for each in measurements])
    title = f"measured in step {step}, under the profiler: peak of {memory}, {name}; times in ms"
    return "\n".join(
        [title, render(measured_table(layout, measurements, device_type, unit)), wrap_paragraph(text)]
    )


def measured_table(
    layout: Layout, measurements: Sequence[RankMeasurement], device_type: str, unit: float
) -> Table:
    """Format memory and times. The row of a range of ranks has the largest peak memory and the mean times."""
    times = ["step", "compute", "communication", "bubble"] + (["idle"] if device_type == "cuda" else [])
    headings = ["step", "compute", "exposed comm", "bubble", "idle"][: len(times)]
    table = plain_table("ranks", "pp", "dp", "cp", "tp", "expected", "measured", *headings, left=5)
    for ranks in rank_ranges(layout):
        coordinates = [layout.coordinates[rank] for rank in ranks]
        group = [measurements[rank] for rank in ranks]
        table.add_row(
            format_range(ranks),
            *(
                format_range([getattr(each, axis) for each in coordinates])
                for axis in ("pp", "dp", "cp", "tp")
            ),
            format_amount(layout.stage_of(ranks[0]).memory.total, unit),
            format_amount(max(each.peak for each in group), unit),
            *(f"{sum(getattr(each.times, name) for each in group) / len(group):.1f}" for name in times),
        )
    return table


def _with_bubbles(layout: Layout, measurements: Sequence[RankMeasurement]) -> list[RankMeasurement]:
    """Apply `move_final_wait_to_bubble` to each pipeline."""
    result = list(measurements)
    spacing = layout.world_size // layout.size.pp
    for first in range(spacing):
        ranks = range(first, layout.world_size, spacing)
        for rank, times in zip(
            ranks, move_final_wait_to_bubble([measurements[rank].times for rank in ranks])
        ):
            result[rank] = RankMeasurement(measurements[rank].peak, times)
    return result
