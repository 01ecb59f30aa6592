"""What a run writes down of itself: `metrics.jsonl`, one line a step, `evaluations.jsonl` and `events.jsonl`.

Every line of `metrics.jsonl` is a JSON object with the fields of `StepMetrics` (with experts `ExpertStepMetrics`), in
that order, and with multi-token prediction `mtp_1_loss` and so on; every line of `evaluations.jsonl` has `step`,
`validation_loss` and `validation_perplexity`, or other `validation_…` figures. A figure that is not known is null. So
is one that is NaN or infinite, for JSON has neither: a loss that was lost shows as `"loss": null` with
`"nan_iterations": 1`. A run that goes on from step k first cuts off what an earlier process wrote beyond k, so that no
step is there twice. `events.jsonl` keeps everything: a line for each unusual event, with its `time`, the `event`'s
kind, a `text` for a reader, and its figures. Models with experts have `experts.jsonl` too: at every log interval
`tokens`, for each layer the tokens sent to each of its experts. `starts.jsonl` has a line for each time that the run
was started, with its machine and layout, and `measured_step.json` each rank's times of one step.

How a step's tokens were spread over the experts, in figures for the log.

A text file that lines are appended to, for as long as the disk takes them.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megalith.config import ModelConfig, RunConfig
from megalith.errors import DataError
from megalith.io import open_file
from megalith.models.load_balance import AUX, DROPPED, Z
from megalith.progress import Progress
from megalith.remote import StorePath, open_location, size_of
from megalith.report.trackers import BALANCING_LOSSES, Tracker
from megalith.small_files import RefusedFile, read_small_file

METRICS_FILE = "metrics.jsonl"
MOST_METRICS = 2**31  # bytes; 5 million steps
EVALUATIONS_FILE = "evaluations.jsonl"
EVENTS_FILE = "events.jsonl"
EXPERTS_FILE = "experts.jsonl"
STARTS_FILE = "starts.jsonl"
MEASURED_FILE = "measured_step.json"
ASKED_FOR = ("num_zeros", "params_norm")  # keys that a line has where there is a figure
MAX_PERPLEXITY_EXPONENT = 20  # Megatron's: a perplexity beyond e^20 says no more


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step. Field names are the keys of `metrics.jsonl`."""

    step: int
    """Counted from 1."""
    loss: float | None
    """Mean over the step's tokens; NaN or infinite when it was lost."""
    grad_norm: float | None
    """Before clipping."""
    lr: float
    global_batch_size: int
    """Sequences in this step."""
    consumed_samples: int
    """Sequences since the start of the run, this step's included."""
    step_time_ms: float
    tokens_per_second_per_device: float | None
    tflops_per_device: float | None
    """In the causal convention (see planner/counts.py)."""
    mfu: float | None
    """0 to 1; None on a device without a known peak."""
    max_memory_gb: float | None
    """Most memory allocated on the device so far, in 10^9 bytes."""
    skipped: int = 0
    """1 when the update was skipped (a gradient overflowed), else 0."""
    nan_iterations: int = 0
    """1 when the loss was NaN or infinite, else 0: a sum over lines counts them."""
    loss_scale: float | None = None
    """fp16 only."""
    num_zeros: float | None = None
    """Elements of the gradient that are 0: a key at the log intervals of log.log_num_zeros_in_grad alone."""
    params_norm: float | None = None
    """Norm of the weights after the step: likewise, of log.log_params_norm."""


@dataclass(frozen=True)
class ExpertStepMetrics(StepMetrics):
    """A step of a model with experts, whose lines have these keys too."""

    moe_aux_loss: float | None = None
    """The experts' balancing loss before its coefficient, mean over layers and micro-batches; 1 when balanced."""
    moe_z_loss: float | None = None
    """The router's z-loss before its coefficient, likewise."""
    moe_dropped: float | None = None
    """Share of the choices of token and expert that capacities dropped, 0 to 1."""
    moe_imbalance: float | None = None
    """The most tokens of an expert against the mean, averaged over layers; 1 when balanced."""


def perplexity(loss: float) -> float:
    """exp(loss), at most e^20; NaN for NaN."""
    return loss if math.isnan(loss) else math.exp(min(loss, MAX_PERPLEXITY_EXPONENT))


def finite(value: Any) -> Any:
    """`value`, or None when it is a NaN or infinite float."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsWriter:
    """Appends to the two files of `output_dir` and passes the same figures on to `sinks`.

    start_step: the last step that this process will not repeat; lines beyond it are cut off. One process of
    a run has a writer.
    """

    def __init__(self, output_dir: str | Path, start_step: int = 0, sinks: Sequence[Tracker] = ()):
        self._folder = Path(output_dir)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._sinks = list(sinks)
        self._events = LineWriter(self._folder / EVENTS_FILE, late=True)
        self._open(start_step)

    def _open(self, start_step: int) -> None:
        for name in (METRICS_FILE, EVALUATIONS_FILE, EXPERTS_FILE):
            truncate_after_step(self._folder / name, start_step)
        self._metrics = LineWriter(self._folder / METRICS_FILE)
        self._evaluations = LineWriter(self._folder / EVALUATIONS_FILE)
        self._experts = LineWriter(self._folder / EXPERTS_FILE, late=True)

    def rewind(self, step: int) -> None:
        """Cuts off what was written of the steps after `step`."""
        self._close()
        self._open(step)
        for sink in self._sinks:
            sink.rewind(step)

    def _close(self) -> None:
        for file in (self._metrics, self._evaluations, self._experts):
            file.close()

    def log_event(self, record: dict[str, Any]) -> None:
        """`record`: what happened, as JSON takes it; NaN and infinite figures become null."""
        self._events.write(_dated(record))

    def log_start(self, record: dict[str, Any]) -> None:
        """`record`: from which step, on what machine, in which layout."""
        starts = LineWriter(self._folder / STARTS_FILE, late=True)
        starts.write(_dated(record))
        starts.close()

    def log_step(self, metrics: StepMetrics, more: Mapping[str, Any] | None = None) -> None:
        """`more`: what the line has besides."""
        record = {
            key: finite(value)
            for key, value in (asdict(metrics) | dict(more or {})).items()
            if value is not None or key not in ASKED_FOR
        }
        self._metrics.write(json.dumps(record, allow_nan=False))
        self._send("train", record)

    def log_timers(self, step: int, times: dict[str, float]) -> None:
        """`times`: milliseconds a step of each phase, of the slowest rank; for the trackers alone."""
        self._send("timers", {"step": step, **times})

    def log_experts(self, step: int, tokens: dict[int, list[int]]) -> None:
        """`tokens`: those sent to each expert, by layer number."""
        self._experts.write(json.dumps({"step": step, "tokens": tokens}))

    def log_evaluation(
        self, step: int, validation_loss: float | None, figures: Mapping[str, float] | None = None
    ) -> None:
        """`figures`: what the line has besides; None: the loss is a mean over tokens, in nats, and has a perplexity.
        Weights that are judged otherwise have no loss."""
        figures = {"perplexity": perplexity(validation_loss)} if figures is None else figures
        named = {f"validation_{name}": value for name, value in {"loss": validation_loss, **figures}.items()}
        record = {"step": step, **{name: finite(value) for name, value in named.items()}}
        self._evaluations.write(json.dumps(record, allow_nan=False))
        self._send("validation", record)

    def close(self) -> None:
        self._close()
        self._events.close()
        for sink in list(self._sinks):
            self._guarded(sink, sink.close)

    def _send(self, group: str, record: dict[str, Any]) -> None:
        figures = {
            f"{group}/{key.removeprefix('validation_')}": value
            for key, value in record.items()
            if key != "step" and value is not None
        }
        for sink in list(self._sinks):
            self._guarded(sink, partial(sink.write, record["step"], figures))

    def _guarded(self, sink: Tracker, call: Callable[[], None]) -> None:
        """A tracker that fails gets no more figures: it is no reason to end a run."""
        try:
            call()
        except Exception as error:
            self._sinks.remove(sink)
            warnings.warn(
                f"{type(sink).__name__} gets no more figures, it failed with {type(error).__name__}: {error}; "
                f"{self._folder / METRICS_FILE} has them all",
                stacklevel=3,
            )

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _dated(record: dict[str, Any]) -> str:
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    line = {"time": now, **{key: finite(value) for key, value in record.items()}}
    return json.dumps(line, allow_nan=False)


def metrics_size(folders: Sequence[str | Path]) -> int:
    """What the metrics of these runs take."""
    paths = [open_location(folder) / METRICS_FILE for folder in folders]
    return sum(size_of(path) for path in paths if path.is_file())


def read_records(path: str | Path | StorePath, progress: Progress | None = None) -> list[dict[str, Any]]:
    """The objects of a metrics or evaluations file, also of a store; none when there is no file.

    A last line that a crash tore is left out; any other line that is not one is a DataError naming it. `progress`
    counts the bytes.
    """
    path = open_location(path)
    if not path.is_file():
        return []
    try:
        content = read_small_file(path, path.parent, MOST_METRICS)
    except RefusedFile as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    lines = content.decode(errors="replace").split("\n")
    torn = lines.pop()  # what follows the last newline: nothing, or the line that a crash cut short
    records = []
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is None:
            raise DataError(
                f"{path}, line {number} is not a JSON object with a step; correct or remove that line"
            )
        records.append(record)
        if progress is not None:
            progress.add(len(line) + 1)
    if torn and (record := _parse(torn)) is not None:
        records.append(record)
    return records


def last_step(path: str | Path) -> int:
    """The last step in a metrics file, whatever else it holds; 0 where there is none."""
    path = Path(path)
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []
    return max((record["step"] for line in lines if (record := _parse(line)) is not None), default=0)


def truncate_after_step(path: str | Path, step: int) -> None:
    """Drops what stands in `path` from the first line of a later step on, and a torn last line. It is cut off in its
    place, which takes no room on the disk; a file that needs no cut is not touched. Raises OSError."""
    path = Path(path)
    if not path.is_file():
        return
    with os.fdopen(open_file(path, os.O_RDWR), "r+b") as file:
        end = 0
        for line in file:
            record = _parse(line)
            if record["step"] > step if record else not line.endswith(b"\n"):
                break
            end += len(line)
        if end < os.fstat(file.fileno()).st_size:
            os.ftruncate(file.fileno(), end)
            os.fsync(file.fileno())


def _parse(line: str | bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def add_expert_metrics(
    metrics: StepMetrics, tallies: Tensor, config: RunConfig
) -> tuple[ExpertStepMetrics, dict[int, list[int]]]:
    """A step's metrics with those of its experts, and the tokens sent to each expert, by layer number.

    From the tallies float32 [layers with experts, experts + 3], which it reads on the host.
    """
    model, rows = config.model, tallies.double().cpu()
    micro_batches = metrics.global_batch_size // config.train.micro_batch_size
    counts = rows[:, : model.num_experts]
    losses = rows[:, [AUX, Z]].mean(0).div(micro_batches).tolist()
    balances = model.moe_aux_loss_coeff > 0 and model.moe_router_load_balancing_type != "none"
    found = ExpertStepMetrics(
        **vars(metrics),
        moe_aux_loss=losses[0] if balances else None,
        moe_z_loss=losses[1] if model.moe_z_loss_coeff > 0 else None,
        moe_dropped=(rows[:, DROPPED].sum() / counts.sum()).item(),
        moe_imbalance=(counts.amax(1) / counts.mean(1)).mean().item(),
    )
    return found, dict(zip(model.expert_layers, counts.long().tolist()))


def extra_losses(
    metrics: StepMetrics, further: Sequence[float], model: ModelConfig
) -> dict[str, float | None]:
    """Return the step's losses besides the next token's, by Megatron-LM's names and in its order.

    `further`: those of the layers of multi-token prediction.
    """
    losses = {}
    if isinstance(metrics, ExpertStepMetrics):
        name = BALANCING_LOSSES.get(model.moe_router_load_balancing_type, "")
        losses = {name: metrics.moe_aux_loss, "z_loss": metrics.moe_z_loss}
    return {name: loss for name, loss in losses.items() if loss is not None} | {
        f"mtp_{depth} loss": loss for depth, loss in enumerate(further, 1)
    }


class LineWriter:
    """Hands each line to the system at once, so that a killed process loses none.

    What a full disk refuses waits in memory and is written, in order, with the next line that finds room: a run's log
    is no reason to end it. A warning tells of the first refusal. One process has a file open. Raises OSError only when
    it is made, and not with `late`: then the first line opens the file.
    """

    def __init__(self, path: Path, late: bool = False):
        self._path = path
        self._descriptor: int | None = None
        self._waiting = b""
        self._refused = False
        if not late:
            self._open()

    def write(self, line: str) -> None:
        """Appends a line, without its end."""
        self._waiting += line.encode() + b"\n"
        try:
            self._open()
            while self._waiting:  # a disk that fills up takes a part
                self._waiting = self._waiting[os.write(self._descriptor, self._waiting) :]
            self._refused = False
        except OSError as error:
            if not self._refused:
                warnings.warn(
                    f"{self._path} could not be written: {error.strerror}; its lines are buffered until it can",
                    stacklevel=2,
                )
            self._refused = True

    def close(self) -> None:
        """Closes the file; lines that no room was found for are lost."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> None:
        if self._descriptor is not None:
            return
        self._descriptor = open_file(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            self._waiting = b"\n" + self._waiting  # a crash has cut the last line off before its end
