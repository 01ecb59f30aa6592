"""Detection of stragglers: ranks that compute for longer than others with the same work.

All ranks wait for a straggler in every step. A step takes equally long on every rank, because the ranks meet in its
collectives. So one step per interval is measured, and the time that a rank spent neither in communication nor waiting
for the pipeline counts as compute. This time is compared with the times of the other ranks of the same pipeline stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median_low

import torch

from megalith.comm.collectives import gather_json
from megalith.config import RuntimeConfig
from megalith.parallel.mesh import Mesh
from megalith.report.measured_step import StepMeasurement, StepTimes


class StragglerDetector:
    """Measures one step per interval and reports each straggler through `on_event`.

    Every rank calls `before_step` and `after_step` around every step.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        mesh: Mesh,
        device: torch.device,
        is_traced: Callable[[int], bool],
        on_event: Callable[..., None],
    ):
        """Prepare to measure. `is_traced` returns True for a step in which another profiler runs."""
        self._interval = config.straggler_interval
        self._enabled = config.enable_straggler_detection and mesh.world.size > 1
        self._threshold = config.straggler_threshold
        self._mesh, self._device, self._is_traced, self._on_event = mesh, device, is_traced, on_event
        self._measure: StepMeasurement | None = None
        self._step = 0
        self.measurements = 0
        """Number of measured steps."""

    def before_step(self, step: int) -> None:
        if self._enabled and step % self._interval == 0 and not self._is_traced(step):
            self._step, self._measure = step, StepMeasurement(self._device, self._mesh.world)
            self._measure.start()

    def after_step(self) -> None:
        if self._measure is None:
            return
        times = self._measure.stop()
        self._measure = None
        self.measurements += 1
        compute_times = dict(enumerate(gather_json(compute_time(times), self._mesh.world)))
        stages: dict[int, dict[int, float]] = {}
        for rank, milliseconds in compute_times.items():
            stages.setdefault(self._mesh.describe(rank).pp, {})[rank] = milliseconds
        for stage in stages.values():
            for rank, ratio in slow_ranks(stage, self._threshold).items():
                self._on_event(
                    f"rank {rank} is slow: in step {self._step} its compute time was "
                    f"{compute_times[rank]:.1f} ms, {ratio:.2f} times the median of ranks with "
                    "the same work; check its device's clock and temperature",
                    event="straggler",
                    step=self._step,
                    rank=rank,
                    ratio=ratio,
                )


def compute_time(times: StepTimes) -> float:
    """Return the milliseconds that a rank spent neither in communication nor in the pipeline bubble."""
    return times.step - times.communication - times.bubble


def slow_ranks(milliseconds: Mapping[int, float], threshold: float) -> dict[int, float]:
    """Return, by rank, the time divided by the lower median of the times, for ranks whose ratio exceeds `threshold`."""
    median = median_low(milliseconds.values())
    return {rank: time / median for rank, time in milliseconds.items() if time > threshold * median}
