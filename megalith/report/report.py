"""Report of a run: reads the figures of each step from the device and logs them on one rank."""

from __future__ import annotations

import math
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
from megalith.planner.counts import flops_per_token, throughput
from megalith.planner.layout import Layout, build_layout
from megalith.planner.topology import gather_rank_locations, topology_notes
from megalith.report.clock import PhaseTimers, StartupTimer, StepTimer, format_timers
from megalith.report.console import TrainingConsole, open_console
from megalith.report.health import ReadStep
from megalith.report.layout_text import LayoutReport, layout_text, wrap_paragraph
from megalith.report.metrics import (
    METRICS_FILE,
    MetricsWriter,
    StepMetrics,
    add_expert_metrics,
    extra_losses,
    last_step,
)
from megalith.report.profiler import StepProfiler, traced_steps
from megalith.report.stragglers import StragglerDetector
from megalith.report.summary import print_summary, start_record
from megalith.report.trackers import open_trackers


class Work(NamedTuple):
    """How much a step trained on, over all ranks, without padding."""

    tokens: int
    squares: int
    """Σ of the squared lengths of what attends to itself alone."""


@dataclass(frozen=True)
class PendingStep:
    """A step whose figures may still be on the device."""

    step: int
    consumed_samples: int
    batch_size: int
    lr: float
    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor
    loss_scale: Tensor
    num_zeros: Tensor | None = None
    """Elements of the gradient that are 0, where it was counted."""
    params_norm: Tensor | None = None
    """Norm of the weights after the step, where it was taken."""
    timers: PhaseTimers | None = None
    """Of the run, with the times since the last log line."""
    mtp_losses: Tensor | None = None
    """Mean loss of each layer of multi-token prediction, float32 [layers]."""
    tallies: Tensor | None = None
    """What the experts got, float32 [layers with experts, experts + 3]."""
    extra_metrics: Callable[[], dict[str, Any]] | None = None
    """Gives what else the step's line has; waits for the device."""
    console_metrics: Sequence[str] = ()
    """Which of these the console shows."""
    work: Work | None = None
    """What the step trained on; None: whole sequences."""

    def read(self) -> ReadStep:
        """Its figures on the host; waits for the device."""
        figures = {
            name: figure
            for name in ("loss", "grad_norm", "skipped", "loss_scale", "num_zeros", "params_norm")
            if (figure := getattr(self, name)) is not None
        }
        read = dict(zip(figures, torch.stack([figure.double() for figure in figures.values()]).tolist()))
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
    starting: StartupTimer | None = None,
) -> Iterator[Report]:
    """The report of a run that has made `step` of `total_steps` steps. Rank 0 prints and writes, the others keep still.

    At the start it prints the summary, where there are several ranks the layout, and `notes`, and writes the resolved
    configuration into the output folder.
    """
    layout = build_layout(config, mesh.world.size)
    places = gather_rank_locations(mesh, device)
    if mesh.world.rank != 0:
        yield Report(layout, mesh, device, step, pipeline)
        return
    output = Path(config.train.output_dir)
    with config_errors(output):
        sinks = open_trackers(config, step, last_step(output / METRICS_FILE) if config.log.wandb else 0)
        replace_file(output / "config.yaml", config.to_yaml())
        metrics = MetricsWriter(output, step, sinks)
    rows = print_summary(layout, local_device_info(device))
    metrics.log_start(start_record(layout, [place.host for place in places], step, rows))
    if mesh.world.size > 1:
        print(layout_text(layout, [place.host for place in places]))
    for note in notes:
        print(f"note: {printable(note)}")
    for note in topology_notes(layout, places):
        print(wrap_paragraph(note))
    if config.log.console == "lines":
        print(f"[before the start of training step] datetime: {datetime.now():%Y-%m-%d %H:%M:%S} ")
    with (
        metrics,
        open_console(total_steps, config.log) as console,
        StepProfiler(output, traced_steps(config.log), console.note) as profiler,
    ):
        yield Report(layout, mesh, device, step, pipeline, metrics, console, profiler, starting)


def flops_by_length(config: RunConfig) -> Callable[[float], float]:
    """A token's FLOPs by the length of its sequence, or the mean that its sequences have over their tokens, Σ n² / Σ n:
    linear in it, but for windows of attention."""
    model, lora, length = config.model, config.lora, config.data.seq_length
    share = config.data.decoder_length / length
    short, whole = (flops_per_token(model, n, lora, n * share).causal for n in (1, length))
    return lambda mean: whole + (whole - short) * (mean - length) / max(length - 1, 1)


class Report:
    """Turns steps into metrics at each log interval, so that between two the host never waits for the device."""

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
        starting: StartupTimer | None = None,
    ):
        """`step` is the last step that was made before."""
        self._config = config = layout.config
        self._clock = StepTimer(device)
        self.last_loss: float | None = None
        self._metrics, self._console, self._profiler = metrics, console, profiler
        self._starting = starting or StartupTimer()
        self._world, self._device = mesh.world, device
        self._layout = LayoutReport(layout, mesh, device, step + 1, self.note, pipeline)
        self._stragglers = StragglerDetector(config.runtime, mesh, device, self._is_traced, self.event)
        self._gpus = GpuMonitor(device, mesh.world, self.event)
        self._gpu_figures: dict[int, dict[str, float]] = {}  # of the step at the last log interval
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
        """To be called at the head of every step; its time begins here and ends with `add`."""
        if self._profiler is not None:
            self._profiler.before_step(step)
        self._layout.before_step(step)
        self._stragglers.before_step(step)
        self._clock.start()

    def add(self, step: PendingStep) -> None:
        """Takes a step; its figures are read at the end of the log interval."""
        self._clock.stop()
        self._layout.after_step()
        self._stragglers.after_step()
        self._pending.append(step)
        if step.step % self._config.log.log_interval == 0:
            self._gpu_figures = {step.step: self._gpus.read(step.step)}
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
        """Reads what is pending and hands it to the log."""
        times = self._clock.milliseconds()
        pending, self._pending = self._pending, []
        for step, milliseconds in zip(pending, times):
            read = step.read()
            self._read.append(read)
            self.last_loss = read.loss
            if self._metrics is not None:
                metrics = self._figures(read, step, milliseconds)
                if step.tallies is not None:
                    metrics, tokens = add_expert_metrics(metrics, step.tallies, self._config)
                    if step.step % self._config.log.log_interval == 0:
                        self._metrics.log_experts(step.step, tokens)
                more = step.extra_metrics() if step.extra_metrics else {}
                further = [] if step.mtp_losses is None else step.mtp_losses.tolist()
                more |= {f"mtp_{depth}_loss": loss for depth, loss in enumerate(further, 1)}
                self._metrics.log_step(metrics, more | self._gpu_figures.pop(step.step, {}))
                losses = extra_losses(metrics, further, self._config.model)
                self._console.log_step(metrics, {name: more[name] for name in step.console_metrics}, losses)

    def _log_timers(self, step: int, timers: PhaseTimers) -> None:
        means = timers.means()
        if not means:
            return
        ranks = gather_json(means, self._world, to_first=True)
        if self._metrics is not None:
            self.note(format_timers(ranks, self._config.log.timing_log_option))
            self._metrics.log_timers(step, {name: max(rank[name] for rank in ranks) for name in means})

    def take_read_steps(self) -> list[ReadStep]:
        """The steps whose figures were read since the last call, on every rank."""
        read, self._read = self._read, []
        return read

    def rewind(self, step: int) -> None:
        """Forgets what was logged of the steps after `step`: they are going to be made again."""
        if self._metrics is not None:
            self._metrics.rewind(step)

    def end(self) -> None:
        """To be called by every rank after the last step."""
        self._layout.end()

    def show_evaluation_progress(self, step: int, done: int, total: int) -> None:
        """So many batches of an evaluation are done."""
        if self._console is not None:
            self._console.show_evaluation_progress(step, done, total)

    def evaluation(self, step: int, loss: float | None, figures: Mapping[str, float] | None = None) -> None:
        """Logs the validation loss after `step`, where there is one, with `figures`; None: it is a mean over tokens."""
        if self._metrics is not None:
            self._metrics.log_evaluation(step, loss, figures)
            self._console.log_evaluation(step, loss, figures)

    def note(self, text: str) -> None:
        """Prints a line of its own."""
        if self._console is not None:
            self._console.note(text)

    def event(self, text: str, *, event: str, **figures: Any) -> None:
        """Something out of the ordinary: a line of its own, and an entry in events.jsonl."""
        self.note(text)
        if self._metrics is not None:
            self._metrics.log_event({"event": event, **figures, "text": text})

    def _figures(self, step: ReadStep, pending: PendingStep, milliseconds: float) -> StepMetrics:
        tokens, flops = step.batch_size * self._tokens, self._flops(self._tokens)
        if pending.work is not None:
            tokens = pending.work.tokens
            flops = self._flops(pending.work.squares / max(tokens, 1))
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
        )

    def _is_traced(self, step: int) -> bool:
        return step == self._layout.step_to_measure or step in self._traced

    def _max_memory_gb(self) -> float | None:
        return torch.cuda.max_memory_allocated(self._device) / 1e9 if self._device.type == "cuda" else None
