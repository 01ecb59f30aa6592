"""Step profiler: runs a window of steps under torch's profiler and writes a Chrome trace and a table of operations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megalith.config import LogConfig
from megalith.io import atomic_path, make_subfolder, replace_file

TABLE_ROWS = 40


def traced_steps(log: LogConfig) -> range:
    """Return the steps that `log.profile` traces; empty if it is off."""
    return range(log.profile_step_start, log.profile_step_end) if log.profile else range(0)


class StepProfiler:
    """Traces the steps in `window` into `output_dir/profile/`. Use it as a context manager.

    Call `before_step` before every step. The trace opens in Perfetto (ui.perfetto.dev) or chrome://tracing, with each
    step marked. If training ends within the window, the trace of the steps so far is written. `report` is called with
    the paths of the written files.
    """

    def __init__(
        self,
        output_dir: str | Path,
        window: range,
        report: Callable[[str], None] = lambda text: None,
    ):
        self._folder = Path(output_dir) / "profile"
        self._window = window
        self._report = report
        self._profile: Any = None  # torch.profiler.profile while the window is open
        self._mark: Any = None  # the current step's record_function
        self._traced: list[int] = []

    def before_step(self, step: int) -> None:
        """Start, continue or finish the trace."""
        if step in self._window:
            self._begin(step)
        elif self._profile is not None:
            self._finish()

    def _begin(self, step: int) -> None:
        if self._profile is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
                torch.cuda.synchronize()
            self._profile = torch.profiler.profile(activities=activities, record_shapes=True)
            self._profile.start()
        else:
            self._mark.__exit__(None, None, None)
        self._mark = torch.profiler.record_function(f"step {step}")
        self._mark.__enter__()
        self._traced.append(step)

    def _finish(self) -> None:
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.synchronize()
        self._mark.__exit__(None, None, None)
        self._profile.stop()
        profile, self._profile, self._mark = self._profile, None, None
        trace, table = self._folder / "trace.json", self._folder / "top_operations.txt"
        order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        try:
            make_subfolder(self._folder)
            with atomic_path(trace) as partial:
                profile.export_chrome_trace(str(partial))
            replace_file(table, profile.key_averages().table(sort_by=order, row_limit=TABLE_ROWS) + "\n")
            written = f"{trace}, {table}"
        except (OSError, RuntimeError) as error:  # RuntimeError: torch could not write the trace
            written = f"not written ({error})"
        self._report(f"profile of steps {self._traced[0]} to {self._traced[-1]}: {written}")

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, *error: object) -> None:
        if self._profile is not None:
            self._finish()
