"""From steps to figures: what a step computed on the device becomes a line in the log."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.config import RunConfig
from megalith.hardware import device_kind
from megalith.models.flops import flops_per_token, throughput
from megalith.runtime.clock import StepClock
from megalith.runtime.console import TrainingConsole
from megalith.runtime.metrics import MetricsWriter, StepMetrics


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


class Report:
    """Turns steps into metrics at each log interval, so that between two the host never waits for the device."""

    def __init__(
        self, config: RunConfig, device: torch.device, metrics: MetricsWriter, console: TrainingConsole
    ):
        self.metrics, self.console = metrics, console
        self.clock = StepClock(device)
        self.last_loss: float | None = None
        self._pending: list[PendingStep] = []
        self._device = device
        self._interval = config.log.log_interval if device.type == "cuda" else 1
        self._fp16 = config.train.precision == "fp16"
        self._tokens = config.data.seq_length
        self._flops = flops_per_token(config.model, config.data.seq_length).causal
        self._peak = device_kind(device).peak(config.train.precision)

    def add(self, step: PendingStep) -> None:
        self._pending.append(step)
        if step.step % self._interval == 0:
            self.flush()

    def flush(self) -> None:
        """Reads what is pending and hands it to the log."""
        times = self.clock.milliseconds()
        pending, self._pending = self._pending, []
        for step, milliseconds in zip(pending, times):
            speed = throughput(step.batch_size * self._tokens, milliseconds / 1e3, 1, self._flops, self._peak)
            self.last_loss = step.loss.item()
            metrics = StepMetrics(
                step=step.step,
                loss=self.last_loss,
                grad_norm=step.grad_norm.item(),
                lr=step.lr,
                global_batch_size=step.batch_size,
                consumed_samples=step.consumed_samples,
                step_time_ms=milliseconds,
                tokens_per_second_per_device=speed.tokens_per_second_per_device,
                tflops_per_device=speed.tflops_per_device,
                mfu=speed.mfu,
                max_memory_gb=self._max_memory_gb(),
                skipped=int(step.skipped.item()),
                nan_iterations=int(not math.isfinite(self.last_loss)),
                loss_scale=step.loss_scale.item() if self._fp16 else None,
            )
            self.metrics.log_step(metrics)
            self.console.log_step(metrics)

    def evaluation(self, step: int, loss: float) -> None:
        self.metrics.log_evaluation(step, loss)
        self.console.log_evaluation(step, loss)

    def _max_memory_gb(self) -> float | None:
        return torch.cuda.max_memory_allocated(self._device) / 1e9 if self._device.type == "cuda" else None
