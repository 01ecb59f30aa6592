"""Reads the metrics of each step from the device and logs them on rank 0."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalith.comm.collectives import gather_json
from megalith.config import RunConfig
from megalith.doctor.gpus import GpuMonitor
from megalith.errors import printable
from megalith.hardware import local_device_info
from megalith.io import replace_file
from megalith.launch.lock import config_errors
from megalith.parallel.mesh import Mesh
from megalith.parallel.pipeline.executor import Pipeline
from megalith.planner.flops import flops_per_token, throughput
from megalith.planner.layout import Layout, build_layout
from megalith.planner.layout_text import layout_text
from megalith.planner.topology import gather_rank_locations, topology_notes
from megalith.report.clock import PhaseTimers, StartupTimer, StepTimer, format_timers
from megalith.report.console import LM_LOSS, TrainingConsole, open_console
from megalith.report.expert_metrics import add_expert_metrics, extra_losses
from megalith.report.health import ReadStep
from megalith.report.layout_report import LayoutReport
from megalith.report.metrics import (
    METRICS_FILE,
    MetricsWriter,
    StepMetrics,
    last_step,
)
from megalith.report.profiler import StepProfiler, traced_steps
from megalith.report.stragglers import StragglerDetector
from megalith.report.summary import print_summary, start_record
from megalith.report.trackers import open_trackers
from megalith.tables import wrap_paragraph

HARDWARE_EVENTS = "gpu", "straggler"


class TokenCounts(NamedTuple):
    """Tokens that a step trained on, over all ranks, without padding."""

    tokens: int
    squared_lengths: int
    """Sum of the squared document lengths. Attention does not cross the bounds of documents."""


@dataclass(frozen=True)
class PendingStep:
    """Metrics of a step, which may still be on the device."""

    step: int
    consumed_samples: int
    batch_size: int
    lr: float
    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor
    loss_scale: Tensor
    num_zeros: Tensor | None = None
    """Number of zeros in the gradients, if counted."""
    params_norm: Tensor | None = None
    """Norm of the weights after the step, if computed."""
    max_attention_logit: Tensor | None = None
    """Largest attention logit, if recorded."""
    output_z_loss: Tensor | None = None
    """Z-loss of the logits before its coefficient; None without model.output_z_loss_coeff."""
    timers: PhaseTimers | None = None
    """The run's phase timers, with the times since the last log line."""
    mtp_losses: Tensor | None = None
    """Mean loss of each MTP layer, float32 [layers]."""
    tallies: Tensor | None = None
    """Expert load, float32 [MoE layers, experts + 3]."""
    extra_metrics: Callable[[], dict[str, Any]] | None = None
    """Function that returns additional metrics of the step. It synchronizes the device."""
    console_metrics: Sequence[str] = ()
    """Names of the extra metrics that the console shows."""
    console_line: Callable[[int, Mapping[str, Any]], str | None] | None = None
    """Function from the step's number and extra metrics to the task's own console line for the step."""
    token_counts: TokenCounts | None = None
    """Tokens that the step trained on; None: full sequences."""

    def read(self) -> ReadStep:
        """Copy the metrics to the host. Synchronizes the device."""
        metrics = {
            name: value
            for name in (
                "loss",
                "grad_norm",
                "skipped",
                "loss_scale",
                "num_zeros",
                "params_norm",
                "max_attention_logit",
                "output_z_loss",
            )
            if (value := getattr(self, name)) is not None
        }
        read = dict(zip(metrics, torch.stack([value.double() for value in metrics.values()]).tolist()))
        read["skipped"] = bool(read["skipped"])
        return ReadStep(self.step, self.consumed_samples, self.batch_size, **read)


@contextmanager
def open_report(
    config: RunConfig,
    notes: Sequence[str],
    mesh: Mesh,
    device: torch.device,
    step: int,
    total_steps: int,
    pipeline: Pipeline | None = None,
    startup_timer: StartupTimer | None = None,
    loss_name: str = LM_LOSS,
    continues: bool = False,
) -> Iterator[Report]:
    """Open the report of a run that has completed `step` of `total_steps` steps. Only rank 0 prints and writes.

    Prints the summary, the layout if there are several ranks, and `notes`; writes the resolved configuration into the
    output folder. A run that `continues` from memory keeps the file of its start if the disk is full.
    """
    layout = build_layout(config, mesh.world.size)
    locations = gather_rank_locations(mesh, device)
    if mesh.world.rank != 0:
        yield Report(layout, mesh, device, step, pipeline)
        return
    output = Path(config.train.output_dir)
    with config_errors(output):
        trackers = open_trackers(config, step, last_step(output / METRICS_FILE) if config.log.wandb else 0)
        write_config(output / "config.yaml", config.to_yaml(), continues)
        metrics = MetricsWriter(output, step, trackers)
    rows = print_summary(layout, local_device_info(device))
    hosts = [location.host for location in locations]
    metrics.log_start(start_record(layout, hosts, step, rows))
    if mesh.world.size > 1:
        print(layout_text(layout, hosts))
    for note in notes:
        print(f"note: {printable(note)}")
    for note in topology_notes(layout, locations):
        print(wrap_paragraph(note))
    if config.log.console == "lines":
        print(f"[before the start of training step] datetime: {datetime.now():%Y-%m-%d %H:%M:%S} ")
    with (
        metrics,
        open_console(total_steps, config.log, loss_name=loss_name) as console,
        StepProfiler(output, traced_steps(config.log), console.note) as profiler,
    ):
        yield Report(layout, mesh, device, step, pipeline, metrics, console, profiler, startup_timer)


def write_config(path: Path, text: str, keeps_old: bool) -> None:
    """Write a run's configuration. Raises OSError, unless there is an old file to keep."""
    try:
        replace_file(path, text)
    except OSError as error:
        if not (keeps_old and path.exists()):
            raise
        text = f"{path} could not be written: {error.strerror}; it keeps the settings of the run's last start"
        warnings.warn(text, stacklevel=2)


def flops_by_length(config: RunConfig) -> Callable[[float], float]:
    """Return a function from the mean document length, weighted by tokens (Σ n² / Σ n), to FLOPs per token.

    FLOPs per token are linear in the length, so the function interpolates between 1 token and the full sequence. This
    is inexact with sliding-window attention.
    """
    model, lora, length = config.model, config.lora, config.data.seq_length
    share = config.data.decoder_length / length
    shortest, longest = (flops_per_token(model, n, lora, n * share).causal for n in (1, length))
    return lambda mean: longest + (longest - shortest) * (mean - length) / max(length - 1, 1)


class Report:
    """Logs the metrics of steps. Only the steps at log intervals synchronize the device to read them."""

    def __init__(
        self,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        step: int,
        pipeline: Pipeline | None = None,
        metrics: MetricsWriter | None = None,
        console: TrainingConsole | None = None,
        profiler: StepProfiler | None = None,
        startup_timer: StartupTimer | None = None,
    ):
        """Prepare to report the steps after `step`, the last completed one; 0 for a new run."""
        self._config = config = layout.config
        self._clock = StepTimer(device)
        self.last_loss: float | None = None
        self._metrics, self._console, self._profiler = metrics, console, profiler
        self._starting = startup_timer or StartupTimer()
        self._world, self._device = mesh.world, device
        self._layout = LayoutReport(layout, mesh, device, step + 1, self.note, pipeline)
        self._stragglers = StragglerDetector(config.runtime, mesh, device, self._is_traced, self.event)
        self._gpus = GpuMonitor(device, mesh.world, self.event)
        self._gpu_metrics: dict[int, dict[str, float]] = {}  # of the step at the last log interval
        self._hardware_events: list[dict[str, Any]] = []
        self._measurements = 0  # straggler measurements up to the last `take_hardware_events`
        self._read: list[ReadStep] = []
        self._pending: list[PendingStep] = []
        self._first = step + 1
        self._interval = config.log.log_interval if device.type == "cuda" else 1
        self._fp16 = config.train.precision == "fp16"
        self._tokens = config.data.seq_length
        self._flops = flops_by_length(config)
        self._peak = local_device_info(device).peak(config.train.peak_dtype)
        self._traced = traced_steps(config.log)

    def before_step(self, step: int) -> None:
        """Start timing `step`. Call it before every step. `add` stops the timing."""
        if self._profiler is not None:
            self._profiler.before_step(step)
        self._layout.before_step(step)
        self._stragglers.before_step(step)
        self._clock.start()

    def add(self, step: PendingStep) -> None:
        """Record a completed step. Its metrics are read at the end of the log interval."""
        self._clock.stop()
        self._layout.after_step()
        self._stragglers.after_step()
        self._pending.append(step)
        if step.step % self._config.log.log_interval == 0:
            self._gpu_metrics = {step.step: self._gpus.read(step.step)}
        if step.step == self._first or step.step % self._interval == 0:
            self.flush()
        if step.timers is not None and step.step % self._config.log.log_interval == 0:
            self._log_timers(step.step, step.timers)
        if step.step == self._first:
            self._gpus.begin()
            self._starting.mark("first step")
            if parts := str(self._starting):
                self.note(parts)

    def flush(self) -> None:
        """Read and log the metrics of all pending steps."""
        times = self._clock.milliseconds()
        pending, self._pending = self._pending, []
        for step, milliseconds in zip(pending, times):
            read = step.read()
            self._read.append(read)
            self.last_loss = read.loss
            if self._metrics is not None:
                metrics = self._step_metrics(read, step, milliseconds)
                if step.tallies is not None:
                    metrics, tokens = add_expert_metrics(metrics, step.tallies, self._config)
                    if step.step % self._config.log.log_interval == 0:
                        self._metrics.log_experts(step.step, tokens)
                extra = step.extra_metrics() if step.extra_metrics else {}
                mtp_losses = [] if step.mtp_losses is None else step.mtp_losses.tolist()
                extra |= {f"mtp_{depth}_loss": loss for depth, loss in enumerate(mtp_losses, 1)}
                self._metrics.log_step(metrics, extra | self._gpu_metrics.pop(step.step, {}))
                losses = extra_losses(metrics, mtp_losses, self._config.model)
                shown = {name: extra[name] for name in step.console_metrics}
                line = None if step.console_line is None else step.console_line(read.step, extra)
                self._console.log_step(metrics, shown, losses, line)

    def _log_timers(self, step: int, timers: PhaseTimers) -> None:
        means = timers.means()
        if not means:
            return
        ranks = gather_json(means, self._world, to_first=True)
        if self._metrics is not None:
            self.note(format_timers(ranks, self._config.log.timing_log_option))
            self._metrics.log_timers(step, {name: max(rank[name] for rank in ranks) for name in means})

    def take_read_steps(self) -> list[ReadStep]:
        """Return the steps read since the last call, on every rank."""
        read, self._read = self._read, []
        return read

    def rewind(self, step: int) -> None:
        """Remove the logged metrics of the steps after `step`. These steps will be repeated."""
        if self._metrics is not None:
            self._metrics.rewind(step)

    def end(self) -> None:
        """Report the run's peak memory. Collective over all ranks, after the last step."""
        self._layout.end()

    def show_evaluation_progress(self, step: int, done: int, total: int) -> None:
        """Show that `done` of `total` batches of an evaluation are done."""
        if self._console is not None:
            self._console.show_evaluation_progress(step, done, total)

    def log_evaluation(
        self, step: int, loss: float | None, extra_metrics: Mapping[str, float] | None = None
    ) -> None:
        """Log an evaluation after `step`; see `MetricsWriter.log_evaluation` for the arguments."""
        if self._metrics is not None:
            self._metrics.log_evaluation(step, loss, extra_metrics)
            self._console.log_evaluation(step, loss, extra_metrics)

    def note(self, text: str) -> None:
        """Print a separate line on rank 0."""
        if self._console is not None:
            self._console.note(text)

    def event(self, text: str, *, event: str, **values: Any) -> None:
        """Report an unusual event: print `text` and append it with `values` to events.jsonl."""
        self.note(text)
        if event in HARDWARE_EVENTS and self._config.runtime.replace_unhealthy_ranks:
            self._hardware_events.append({"event": event, **values, "text": text})
        if self._metrics is not None:
            self._metrics.log_event({"event": event, **values, "text": text})

    def take_hardware_events(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return True if stragglers were measured since the last call, and the new events of GPUs and stragglers.

        Events are complete on rank 0 only, and only with `runtime.replace_unhealthy_ranks`.
        """
        events, self._hardware_events = self._hardware_events, []
        measured, self._measurements = self._measurements, self._stragglers.measurements
        return self._measurements > measured, events

    def _step_metrics(self, step: ReadStep, pending: PendingStep, milliseconds: float) -> StepMetrics:
        tokens, flops = step.batch_size * self._tokens, self._flops(self._tokens)
        if pending.token_counts is not None:
            tokens = pending.token_counts.tokens
            flops = self._flops(pending.token_counts.squared_lengths / max(tokens, 1))
        speed = throughput(tokens, milliseconds / 1e3, self._world.size, flops, self._peak)
        return StepMetrics(
            step=step.step,
            loss=step.loss,
            grad_norm=step.grad_norm,
            lr=pending.lr,
            global_batch_size=step.batch_size,
            consumed_samples=step.consumed_samples,
            step_time_ms=milliseconds,
            tokens_per_second_per_device=speed.tokens_per_second_per_device,
            tflops_per_device=speed.tflops_per_device,
            mfu=speed.mfu,
            max_memory_gb=self._max_memory_gb(),
            skipped=int(step.skipped),
            nan_iterations=int(not math.isfinite(step.loss)),
            loss_scale=step.loss_scale if self._fp16 else None,
            num_zeros=step.num_zeros,
            params_norm=step.params_norm,
            max_attention_logit=step.max_attention_logit,
            output_z_loss=step.output_z_loss,
        )

    def _is_traced(self, step: int) -> bool:
        return step == self._layout.step_to_measure or step in self._traced

    def _max_memory_gb(self) -> float | None:
        return torch.cuda.max_memory_allocated(self._device) / 1e9 if self._device.type == "cuda" else None
