"""Writes a run's metrics to its output folder: `metrics.jsonl`, `evaluations.jsonl`, `events.jsonl` and others.

- `metrics.jsonl`: one object per step with the fields of `StepMetrics` (`ExpertStepMetrics` for MoE models), in that
  order, then `mtp_1_loss` and so on. Unknown, NaN and infinite values are null; a bad step has `"loss": null` and
  `"nan_iterations": 1`. A run that resumes at step k first removes later lines, so that no step appears twice.
- `evaluations.jsonl`: `step`, `validation_loss` and `validation_perplexity`, or other `validation_…` metrics.
- `events.jsonl`: one object per unusual event with `time`, `event`, `text` and values. Nothing is ever removed.
- `experts.jsonl` (MoE models): at each log interval `tokens`, the number of tokens per layer and expert.
- `starts.jsonl`: one object per start of the run, with machine and layout.
- `measured_step.json`: each rank's times of one step.
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
from typing import TYPE_CHECKING, Any

from megalith.errors import DataError
from megalith.io import open_file
from megalith.progress import Progress
from megalith.remote import StorePath, open_location, size_of
from megalith.report.line_writer import LineWriter
from megalith.small_files import RefusedFile, read_small_file

if TYPE_CHECKING:
    from megalith.report.trackers import Tracker

METRICS_FILE = "metrics.jsonl"
MOST_METRICS = 2**31  # bytes; 5 million steps
CHUNK = 1000  # lines that are parsed together, which takes 0.6 of the time
EVALUATIONS_FILE = "evaluations.jsonl"
EVENTS_FILE = "events.jsonl"
EXPERTS_FILE = "experts.jsonl"
STARTS_FILE = "starts.jsonl"
MEASURED_FILE = "measured_step.json"
OPTIONAL_KEYS = (
    "num_zeros",
    "params_norm",
    "max_attention_logit",
    "output_z_loss",
)  # omitted from a line if they have no value
MAX_PERPLEXITY_EXPONENT = 20  # as in Megatron-LM


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step. Field names are the keys of `metrics.jsonl`."""

    step: int
    """Number of the step, counted from 1."""
    loss: float | None
    """Mean over the step's tokens; NaN or infinite for a bad step."""
    grad_norm: float | None
    """Norm of the gradient before clipping."""
    lr: float
    global_batch_size: int
    """Number of sequences in this step."""
    consumed_samples: int
    """Number of sequences since the start of the run, including this step."""
    step_time_ms: float
    tokens_per_second_per_device: float | None
    tflops_per_device: float | None
    """Model TFLOP/s per device, in the causal convention (planner/flops.py)."""
    mfu: float | None
    """Model FLOPs utilization, 0 to 1; None if the device's peak is unknown."""
    max_memory_gb: float | None
    """Peak memory allocated on the device so far, in 10^9 bytes."""
    skipped: int = 0
    """1 if the update was skipped (a gradient overflowed), else 0."""
    nan_iterations: int = 0
    """1 if the loss was NaN or infinite, else 0."""
    loss_scale: float | None = None
    """Loss scale; None except in fp16."""
    num_zeros: float | None = None
    """Number of zeros in the gradients. The key is written only with log.log_num_zeros_in_grad, at log intervals."""
    params_norm: float | None = None
    """Norm of the weights after the step. The key is written only with log.log_params_norm, at log intervals."""
    max_attention_logit: float | None = None
    """Largest attention logit of the step, with log.log_max_attention_logit or optim.qk_clip."""
    output_z_loss: float | None = None
    """Z-loss of the logits before its coefficient, mean over the step's tokens, with model.output_z_loss_coeff."""


@dataclass(frozen=True)
class ExpertStepMetrics(StepMetrics):
    """Metrics of one step of an MoE model."""

    moe_aux_loss: float | None = None
    """Balancing loss before its coefficient, mean over layers and micro-batches; 1 if balanced."""
    moe_z_loss: float | None = None
    """Router z-loss before its coefficient, mean over layers and micro-batches."""
    moe_dropped: float | None = None
    """Fraction of (token, expert) assignments dropped by the capacity, 0 to 1."""
    moe_imbalance: float | None = None
    """Tokens of the busiest expert divided by the mean over experts, averaged over layers; 1 if balanced."""


def perplexity(loss: float) -> float:
    """Return exp(loss), at most e^20; NaN for NaN."""
    return loss if math.isnan(loss) else math.exp(min(loss, MAX_PERPLEXITY_EXPONENT))


def finite(value: Any) -> Any:
    """Return `value`, or None for a NaN or infinite float."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsWriter:
    """Writes the metrics files and sends the metrics of steps and evaluations to trackers. Only rank 0 has one."""

    def __init__(self, output_dir: str | Path, start_step: int = 0, trackers: Sequence[Tracker] = ()):
        """Open the files, and remove the lines of steps after `start_step`, the last step before this
        process starts.
        """
        self._folder = Path(output_dir)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._trackers = list(trackers)
        self._events = LineWriter(self._folder / EVENTS_FILE, lazy=True)
        self._open(start_step)

    def _open(self, start_step: int) -> None:
        for name in (METRICS_FILE, EVALUATIONS_FILE, EXPERTS_FILE):
            truncate_after_step(self._folder / name, start_step)
        self._metrics = LineWriter(self._folder / METRICS_FILE)
        self._evaluations = LineWriter(self._folder / EVALUATIONS_FILE)
        self._experts = LineWriter(self._folder / EXPERTS_FILE, lazy=True)

    def rewind(self, step: int) -> None:
        """Remove the metrics of the steps after `step`."""
        self._close()
        self._open(step)
        for tracker in list(self._trackers):
            self._call(tracker, partial(tracker.rewind, step))

    def _close(self) -> None:
        for file in (self._metrics, self._evaluations, self._experts):
            file.close()

    def log_event(self, record: dict[str, Any]) -> None:
        """Append an event, given as JSON values; NaN and infinite values become null."""
        self._events.write(_dated(record))

    def log_start(self, record: dict[str, Any]) -> None:
        """Append a start of the run with its step, machine and layout."""
        starts = LineWriter(self._folder / STARTS_FILE, lazy=True)
        starts.write(_dated(record))
        starts.close()

    def log_step(self, metrics: StepMetrics, extra_metrics: Mapping[str, Any] | None = None) -> None:
        """Append a step's metrics, followed by `extra_metrics`."""
        record = {
            key: finite(value)
            for key, value in (asdict(metrics) | dict(extra_metrics or {})).items()
            if value is not None or key not in OPTIONAL_KEYS
        }
        self._metrics.write(json.dumps(record, allow_nan=False))
        self._send("train", record)

    def log_timers(self, step: int, times: dict[str, float]) -> None:
        """Send each phase's milliseconds per step on the slowest rank to the trackers."""
        self._send("timers", {"step": step, **times})

    def log_experts(self, step: int, tokens: dict[int, list[int]]) -> None:
        """Append the number of tokens sent to each expert, by layer number."""
        self._experts.write(json.dumps({"step": step, "tokens": tokens}))

    def log_evaluation(
        self, step: int, validation_loss: float | None, extra_metrics: Mapping[str, float] | None = None
    ) -> None:
        """Append an evaluation.

        Args:
            validation_loss: None if the evaluation has no loss.
            extra_metrics: other metrics; None: the loss is a mean over tokens, in nats, and its perplexity is added.
        """
        if extra_metrics is None:
            extra_metrics = {"perplexity": perplexity(validation_loss)}
        metrics = {"loss": validation_loss, **extra_metrics}
        named = {f"validation_{name}": value for name, value in metrics.items()}
        record = {"step": step, **{name: finite(value) for name, value in named.items()}}
        self._evaluations.write(json.dumps(record, allow_nan=False))
        self._send("validation", record)

    def close(self) -> None:
        self._close()
        self._events.close()
        for tracker in list(self._trackers):
            self._call(tracker, tracker.close)

    def _send(self, group: str, record: dict[str, Any]) -> None:
        metrics = {
            f"{group}/{key.removeprefix('validation_')}": value
            for key, value in record.items()
            if key != "step" and value is not None
        }
        for tracker in list(self._trackers):
            self._call(tracker, partial(tracker.write, record["step"], metrics))

    def _call(self, tracker: Tracker, call: Callable[[], None]) -> None:
        """Call a tracker and disable it if it fails, so that it does not end a run."""
        try:
            call()
        except Exception as error:
            self._trackers.remove(tracker)
            warnings.warn(
                f"{type(tracker).__name__} failed with {type(error).__name__}: {error}, and is disabled; "
                f"{self._folder / METRICS_FILE} has all metrics",
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
    """Return the total size of the runs' metrics files, in bytes."""
    paths = [open_location(folder) / METRICS_FILE for folder in folders]
    return sum(size_of(path) for path in paths if path.is_file())


def read_records(path: str | Path | StorePath, progress: Progress | None = None) -> list[dict[str, Any]]:
    """Read the objects of a metrics or evaluations file, local or in a store.

    Args:
        path: the file. A missing file has no records.
        progress: counts the bytes.

    Raises:
        DataError: a line is not a JSON object with a step. A last line cut off by a crash is ignored.
    """
    path = open_location(path)
    if not path.is_file():
        return []
    try:
        content = read_small_file(path, path.parent, MOST_METRICS)
    except RefusedFile as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    lines = content.decode(errors="replace").split("\n")
    torn = lines.pop()  # after the last newline: empty, or a line cut off by a crash
    records = []
    for start in range(0, len(lines), CHUNK):
        chunk = lines[start : start + CHUNK]
        parsed = _parse_together(chunk) or [_parse(line) for line in chunk]
        if None in parsed:
            raise DataError(
                f"{path}, line {start + parsed.index(None) + 1} is not a JSON object with a step; correct or remove "
                "that line"
            )
        records += parsed
        if progress is not None:
            progress.add(sum(map(len, chunk)) + len(chunk))
    if torn and (record := _parse(torn)) is not None:
        records.append(record)
    return records


def last_step(path: str | Path) -> int:
    """Return the last step in a metrics file, or 0 if there is none. Invalid lines are ignored."""
    path = Path(path)
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []
    return max((record["step"] for line in lines if (record := _parse(line)) is not None), default=0)


def truncate_after_step(path: str | Path, step: int) -> None:
    """Truncate the file before the first line of a step after `step`, or before a last line cut off by a crash.

    The file is truncated in place, which needs no disk space. If there is nothing to remove, the file is not changed.

    Raises:
        OSError: the file cannot be written.
    """
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
    return record if _has_step(record) else None


def _parse_together(lines: list[str]) -> list[dict[str, Any]]:
    """Return the records of the lines; an empty list if any of the lines is invalid."""
    try:
        records = json.loads(f"[{','.join(lines)}]")
    except (ValueError, RecursionError):
        return []
    return records if len(records) == len(lines) and all(map(_has_step, records)) else []


def _has_step(record: Any) -> bool:
    return isinstance(record, dict) and isinstance(record.get("step"), int)
