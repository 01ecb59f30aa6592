"""Console output of a training run: a live line on a terminal, Megatron-LM's log lines in a file or a pipe.

Scripts that parse Megatron-LM's logs can parse these: the lines have the same fields, order and widths. Unless
log.console is `lines`, the remaining time follows at the end. On a terminal, a live line at the bottom shows every
step and one permanent line is printed per log interval. Both show means over the log interval.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from megalith import progress
from megalith.config import LogConfig
from megalith.errors import LINES, printable
from megalith.report.metrics import StepMetrics, perplexity
from megalith.tables import format_si

Metrics = Mapping[str, float | None]
NO_METRICS: Metrics = MappingProxyType({})
SHORT_NAMES = {"rewards_mean": "reward", "completion_length": "length"}  # of metrics, on a terminal
LM_LOSS = "lm loss"  # Megatron-LM's name of the training loss


class TrainingConsole(AbstractContextManager):
    """Base class of the consoles, and a context manager. Only rank 0 of a run has one."""

    def __init__(self, total_steps: int, log_interval: int, loss_name: str = LM_LOSS):
        self._total_steps, self._log_interval = total_steps, log_interval
        self._loss_name = loss_name
        self._interval = LogInterval()
        self._left = EtaEstimator(total_steps)

    def log_step(
        self,
        metrics: StepMetrics,
        extra_metrics: Metrics = NO_METRICS,
        losses: Metrics = NO_METRICS,
        line: str | None = None,
    ) -> None:
        """Record a step with its extra metrics and losses, and print at each log interval and at the last step.

        `line` is the task's own line for this step, which a log prints instead of the log interval's line.
        """
        self._left.add(metrics)
        self._interval.steps.append(metrics)
        self._interval.extra_metrics.append(extra_metrics)
        self._interval.losses.append(losses)
        if metrics.step % self._log_interval == 0 or metrics.step == self._total_steps:
            self._print_interval(self._interval)
            self._interval = LogInterval()

    def _print_interval(self, interval: LogInterval) -> None:
        raise NotImplementedError

    def show_evaluation_progress(self, step: int, done: int, total: int) -> None:
        """Show that `done` of `total` batches of the evaluation after `step` are done."""

    def log_evaluation(
        self, step: int, validation_loss: float | None, extra_metrics: Metrics | None = None
    ) -> None:
        """Print the results of the evaluation after `step`.

        Args:
            validation_loss: None if the evaluation has no loss.
            extra_metrics: other validation metrics; None: the loss is a mean over tokens, in nats, and the line shows
                its perplexity.
        """

    def note(self, text: str) -> None:
        """Print a separate line, such as a checkpoint's path."""


def open_console(
    total_steps: int, log: LogConfig, stream: TextIO | None = None, loss_name: str = LM_LOSS
) -> TrainingConsole:
    """Return a LiveConsole if `stream` (standard output by default) is a terminal, else a LogConsole."""
    stream = stream or sys.stdout
    interval, is_auto = log.log_interval, log.console == "auto"
    if stream.isatty() and is_auto:
        console = Console(file=stream, force_terminal=True)
        if progress.supports_live_line(console):
            return LiveConsole(total_steps, interval, console)
    options = dict(throughput=log.log_throughput, eta=is_auto, loss_name=loss_name)
    return LogConsole(total_steps, interval, stream, **options)


class EtaEstimator:
    """Estimates the remaining time: a moving mean of step times, plus the mean time spent between steps."""

    def __init__(self, total_steps: int):
        self._total_steps, self._last_step = total_steps, 0
        self._mean = self._sum = 0.0  # of the step times, in seconds
        self._began: float | None = None  # when the first step ended
        self._steps = 0  # since the first

    def add(self, metrics: StepMetrics) -> None:
        seconds, now = metrics.step_time_ms / 1e3, time.monotonic()
        self._last_step, self._now = metrics.step, now
        if self._began is None:
            self._began, self._mean = now, seconds
            return
        self._mean = 0.9 * self._mean + 0.1 * seconds
        self._sum, self._steps = self._sum + seconds, self._steps + 1

    def __str__(self) -> str:
        between = max(0.0, self._now - self._began - self._sum) / max(self._steps, 1)
        return str(timedelta(seconds=round((self._total_steps - self._last_step) * (self._mean + between))))


class LogInterval:
    """The steps since the last permanent line, and their means."""

    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []
        self.extra_metrics: list[Metrics] = []
        self.losses: list[Metrics] = []

    @property
    def last(self) -> StepMetrics:
        return self.steps[-1]

    @property
    def loss(self) -> float:
        """Mean of the finite losses, or NaN if there are none, so that the log shows NaN.

        As in Megatron-LM, skipped steps do not count, unless no other step has a finite loss.
        """
        finite = [s for s in self.steps if s.loss is not None and math.isfinite(s.loss)]
        losses = [s.loss for s in finite if not s.skipped] or [s.loss for s in finite]
        return sum(losses) / len(losses) if losses else math.nan

    @property
    def step_time_ms(self) -> float:
        return sum(s.step_time_ms for s in self.steps) / len(self.steps)

    @property
    def means(self) -> dict[str, float]:
        """Means of the extra metrics over the steps that have them."""
        return _means(self.extra_metrics)

    @property
    def mean_extra_losses(self) -> dict[str, float]:
        """Means of the extra losses."""
        return _means(self.losses)

    @property
    def skipped(self) -> int:
        return sum(s.skipped for s in self.steps)

    @property
    def nan_iterations(self) -> int:
        return sum(s.nan_iterations for s in self.steps)

    def rate(self, field: str) -> float | None:
        """Return the mean of a per-second metric, weighted by step time, or None if it is unknown for a step."""
        values = [getattr(s, field) for s in self.steps]
        if None in values:
            return None
        total = sum(s.step_time_ms for s in self.steps)
        return sum(value * s.step_time_ms for value, s in zip(values, self.steps)) / total


def _means(steps: Sequence[Metrics]) -> dict[str, float]:
    return {
        name: sum(values) / len(values)
        for name in steps[-1]
        if (values := [value for each in steps if (value := each.get(name)) is not None])
    }


class LogConsole(TrainingConsole):
    """Prints one Megatron-LM line per log interval and flushes it at once."""

    def __init__(
        self,
        total_steps: int,
        log_interval: int,
        stream: TextIO,
        clock: Callable[[], datetime] = datetime.now,
        throughput: bool = True,
        eta: bool = False,
        loss_name: str = LM_LOSS,
    ):
        super().__init__(total_steps, log_interval, loss_name)
        self._stream, self._clock, self._throughput, self._eta = stream, clock, throughput, eta
        self._has_task_lines = False

    def log_step(
        self,
        metrics: StepMetrics,
        extra_metrics: Metrics = NO_METRICS,
        losses: Metrics = NO_METRICS,
        line: str | None = None,
    ) -> None:
        self._has_task_lines = line is not None and self._eta
        super().log_step(metrics, extra_metrics, losses)
        if line is None:
            return
        fields = [line]
        if self._has_task_lines:
            loss = math.nan if metrics.loss is None else metrics.loss
            fields.append(f"{self._loss_name} {loss:.4e}")
            fields += [] if metrics.grad_norm is None else [f"grad norm {metrics.grad_norm:.3f}"]
            fields += [f"lr {metrics.lr:.2e}", *["skipped"] * metrics.skipped, f"ETA {self._left}"]
        self.note(" | ".join(fields))

    def _print_interval(self, interval: LogInterval) -> None:
        if self._has_task_lines:
            return
        line = megatron_line(interval, self._total_steps, self._clock(), self._throughput, self._loss_name)
        self.note(f"{line} ETA: {self._left} |" if self._eta else line)

    def show_evaluation_progress(self, step: int, done: int, total: int) -> None:
        if done == 0:
            self.note(f" evaluating after iteration {step} on {total} global batches")
            self._evaluation = progress.Progress(
                " evaluating", total, "batches", show=self._eta, stream=self._stream
            )
        self._evaluation.update(done)
        if done == total:
            self._evaluation.end()

    def log_evaluation(
        self, step: int, validation_loss: float | None, extra_metrics: Metrics | None = None
    ) -> None:
        line = megatron_evaluation_line(
            step, validation_loss, extra_metrics=extra_metrics, loss_name=self._loss_name
        )
        rule = "-" * (len(line) + 1)
        self.note(f"{rule}\n{line}\n{rule}")

    def note(self, text: str) -> None:
        self._stream.write(printable(text, LINES) + "\n")
        self._stream.flush()

    def __exit__(self, *error: object) -> None:
        self._stream.flush()


def megatron_line(
    interval: LogInterval, total_steps: int, now: datetime, throughput: bool = True, loss_name: str = LM_LOSS
) -> str:
    """Format Megatron-LM's training log line for `interval`, without fields whose value is unknown."""
    last = interval.last
    fields = [
        f"iteration {last.step:8d}/{total_steps:8d}",
        f"consumed samples: {last.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {interval.step_time_ms:.1f}",
    ]
    tflops = interval.rate("tflops_per_device")
    if tflops is not None and throughput:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {tflops:.1f}")
    fields += [
        f"learning rate: {last.lr:.6E}",
        f"global batch size: {last.global_batch_size:5d}",
        f"{loss_name}: {interval.loss:.6E}",
        *(f"{name}: {value:.6E}" for name, value in interval.mean_extra_losses.items()),
        f"loss scale: {last.loss_scale if last.loss_scale is not None else 1.0:.1f}",
    ]
    if last.grad_norm is not None:
        fields.append(f"grad norm: {last.grad_norm:.3f}")
    if last.num_zeros is not None:
        fields.append(f"num zeros: {last.num_zeros:.1f}")
    if last.params_norm is not None:
        fields.append(f"params norm: {last.params_norm:.3f}")
    fields += [f"{name}: {value:.4f}" for name, value in interval.means.items()]
    fields += [
        f"number of skipped iterations: {interval.skipped:3d}",
        f"number of nan iterations: {interval.nan_iterations:3d}",
    ]
    return f" [{now:%Y-%m-%d %H:%M:%S.%f}] " + " | ".join(fields) + " |"


def megatron_evaluation_line(
    step: int,
    validation_loss: float | None,
    where: str = "",
    extra_metrics: Metrics | None = None,
    loss_name: str = LM_LOSS,
) -> str:
    """Return Megatron-LM's evaluation line, with its trailing blank. `extra_metrics` replace the perplexity."""
    values = {} if validation_loss is None else {f"{loss_name} value": f"{validation_loss:.6E}"}
    if extra_metrics is None:
        values |= {f"{loss_name} PPL": f"{perplexity(validation_loss):.6E}"}
    else:
        values |= {name: f"{value:.4f}" for name, value in extra_metrics.items()}
    fields = "".join(f" | {name}: {value}" for name, value in values.items())
    subject = "validation" if validation_loss is None else "validation loss"
    return f" {subject} at iteration {step}{where}{fields} | "


class LiveConsole(TrainingConsole):
    """Shows a live line for each step at the bottom of a terminal, and above it one line per log interval."""

    def __init__(self, total_steps: int, log_interval: int, console: Console, refresh_seconds: float = 0.1):
        super().__init__(total_steps, log_interval)
        self._refresh_seconds, self._refreshed = refresh_seconds, -math.inf
        # log_step refreshes it: a thread could hold a lock while data workers fork.
        position = Column(no_wrap=True, min_width=len(f"step {total_steps}/{total_steps}"))  # never cut off
        self._progress = Progress(
            TextColumn(
                "[bold]{task.description} {task.completed:.0f}/{task.total:.0f}", table_column=position
            ),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}"),
            console=console,
            auto_refresh=False,
            expand=True,
            transient=True,
        )
        self._task = self._progress.add_task("step", total=total_steps, status="starting")
        self._evaluation: TaskID | None = None

    def log_step(
        self,
        metrics: StepMetrics,
        extra_metrics: Metrics = NO_METRICS,
        losses: Metrics = NO_METRICS,
        line: str | None = None,
    ) -> None:
        status = f"loss {_loss(metrics.loss)}"
        for name, value in extra_metrics.items():
            status += "" if value is None else f"  {name} {value:.4g}"
        status += f"  lr {metrics.lr:.2e}"
        if metrics.tokens_per_second_per_device is not None:
            status += f"  {format_si(metrics.tokens_per_second_per_device)} tok/s"
        super().log_step(metrics, extra_metrics, losses)
        self._progress.update(self._task, completed=metrics.step, status=f"ETA {self._left}  {status}")
        self._refresh()

    def show_evaluation_progress(self, step: int, done: int, total: int) -> None:
        if self._evaluation is None:
            self._evaluation = self._progress.add_task("evaluating", total=total, status="batches")
        left = self._progress.tasks[-1].time_remaining
        status = "batches" if left is None else f"batches  ETA {timedelta(seconds=round(left))}"
        self._progress.update(self._evaluation, completed=done, status=status)
        if done == total:
            self._progress.remove_task(self._evaluation)
            self._evaluation = None
        self._refresh()

    def _refresh(self) -> None:
        if time.monotonic() - self._refreshed >= self._refresh_seconds:
            self._refreshed = time.monotonic()
            self._progress.refresh()

    def log_evaluation(
        self, step: int, validation_loss: float | None, extra_metrics: Metrics | None = None
    ) -> None:
        line = self._position(step)
        loss = "" if validation_loss is None else f" loss {_loss(validation_loss)}"
        line.append(f"  validation{loss}", style="bold green")
        if extra_metrics is None:
            line.append(f"  perplexity {perplexity(validation_loss):.2f}", style="green")
        for name, value in (extra_metrics or {}).items():
            line.append(f"  {name} {value:.4f}", style="green")
        self._print(line)

    def note(self, text: str) -> None:
        self._print(Text(printable(text, LINES)))

    def _print_interval(self, interval: LogInterval) -> None:
        last = interval.last
        line = self._position(last.step)
        rewards = "rewards_mean" in interval.means
        if rewards:
            self._append_means(line, interval)
        line.append(
            f"  loss {_loss(interval.loss)}",
            style="bold cyan" if math.isfinite(interval.loss) else "bold red",
        )
        if last.grad_norm is not None:
            line.append(f"  grad {last.grad_norm:.2f}")
        if not rewards:
            line.append(f"  lr {last.lr:.2e}")
            self._append_means(line, interval)
        tokens, tflops = interval.rate("tokens_per_second_per_device"), interval.rate("tflops_per_device")
        if tokens is not None:
            line.append(f"  {format_si(tokens)} tok/s", style="bold")
        line.append(f"  {interval.step_time_ms:.0f} ms", style="dim")
        if tflops is not None and not rewards:  # the time includes sampling
            line.append(f"  {tflops:.3g} TFLOP/s", style="dim")
        if (mfu := interval.rate("mfu")) is not None:
            line.append(f"  MFU {100 * mfu:.1f}%", style="dim")
        if last.max_memory_gb is not None:
            line.append(f"  {last.max_memory_gb:.1f} GB", style="dim")
        if interval.skipped:
            line.append(f"  {interval.skipped} skipped", style="yellow")
        if interval.nan_iterations:
            line.append(f"  {interval.nan_iterations} NaN", style="bold red")
        self._print(line)

    def _append_means(self, line: Text, interval: LogInterval) -> None:
        for name, value in interval.means.items():
            line.append(
                f"  {SHORT_NAMES.get(name, name)} {value:.4f}", style="bold" if name == "rewards_mean" else ""
            )

    def _position(self, step: int) -> Text:
        return Text(f"{step:>{len(str(self._total_steps))}}/{self._total_steps}")

    def _print(self, line: Text) -> None:
        """Print the line wrapped between words; unwrapped if a word, such as a path, is wider than the terminal."""
        console = self._progress.console
        console.print(line, soft_wrap=max(map(cell_len, line.plain.split()), default=0) > console.width)

    def __enter__(self) -> LiveConsole:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


def _loss(loss: float | None) -> str:
    return "NaN" if loss is None or not math.isfinite(loss) else f"{loss:.4f}"
