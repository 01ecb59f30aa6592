"""Detection of bad steps (NaN or Inf in the loss or gradients) and of loss spikes.

Metrics are read from the device at each log interval, so the check adds no synchronization and finds a bad step up to
an interval late. The optimizer has skipped its update already (optim/step.py). Skipped updates while a dynamic fp16
loss scale is still decreasing are not counted as bad.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megalith.comm.collectives import Axis, all_reduce_no_grad
from megalith.config import RunConfig


@dataclass(frozen=True)
class ReadStep:
    """Metrics of a step on the host, the same on every rank."""

    step: int
    consumed_samples: int
    """Number of samples consumed after the step."""
    batch_size: int
    loss: float
    grad_norm: float
    skipped: bool
    loss_scale: float
    num_zeros: float | None = None
    params_norm: float | None = None
    max_attention_logit: float | None = None
    output_z_loss: float | None = None

    @property
    def first_sample(self) -> int:
        """Number of samples consumed before the step."""
        return self.consumed_samples - self.batch_size


@dataclass(frozen=True)
class HealthStatus:
    """Result of a check. All fields are empty for a healthy run."""

    bad_step: ReadStep | None = None
    """The first of consecutive steps with NaN or Inf."""

    spike: ReadStep | None = None
    """The first step with a loss spike."""

    step_before_spike: ReadStep | None = None
    """The step before the spike. Its update is first used in the forward pass of the spike."""

    too_many_bad_steps: bool = False
    """True if the run should end because runtime.max_bad_steps consecutive steps were bad."""


class HealthMonitor:
    """Checks every step once, in order, with the same result on all ranks."""

    def __init__(self, config: RunConfig, world: Axis):
        runtime, optim = config.runtime, config.optim
        self._world, self._max_bad_steps = world, runtime.max_bad_steps
        self._threshold = runtime.loss_spike_threshold
        self._history: deque[ReadStep] = deque(maxlen=runtime.loss_spike_window)
        dynamic = config.train.precision == "fp16" and optim.loss_scale is None
        self._min_loss_scale = optim.min_loss_scale if dynamic else math.inf
        self._bad_steps: list[int] = []  # consecutive

    def check(self, steps: Sequence[ReadStep]) -> HealthStatus:
        """Check the steps whose metrics were read since the last call. Collective."""
        bad = spike = None
        for step in steps:
            if self.is_bad_step(step.loss, step.skipped, step.loss_scale):
                bad = bad or (step if not self._bad_steps else None)
                self._bad_steps.append(step.step)
                if len(self._bad_steps) == self._max_bad_steps:
                    break
                continue
            self._bad_steps.clear()
            if self.is_loss_spike(step.loss) and spike is None:
                spike = step
            elif spike is None:
                self._history.append(step)
        too_many = len(self._bad_steps) >= self._max_bad_steps
        return self._agree(steps, bad, spike, too_many)

    def is_bad_step(self, loss: float, skipped: bool, loss_scale: float) -> bool:
        """Return True for NaN or Inf, unless the update was skipped while the loss scale was still decreasing."""
        return not math.isfinite(loss) or (skipped and loss_scale <= self._min_loss_scale)

    def is_loss_spike(self, loss: float) -> bool:
        """Return True if the loss exceeds the threshold times the mean over a full window of earlier steps."""
        if self._threshold is None or len(self._history) < self._history.maxlen:
            return False
        return loss > self._threshold * sum(step.loss for step in self._history) / len(self._history)

    def rewind_history(self, step: int) -> None:
        """Remove the history after `step`. These steps will be repeated."""
        kept = [one for one in self._history if one.step <= step]
        self._history.clear()
        self._history.extend(kept)
        self._bad_steps.clear()

    def accept_spike(self, step: ReadStep) -> None:
        """Add a spike to the history, so that later losses are compared with it too."""
        self._history.append(step)

    def _agree(
        self, steps: Sequence[ReadStep], bad: ReadStep | None, spike: ReadStep | None, too_many: bool
    ) -> HealthStatus:
        """Combine the results of all ranks. Their losses may differ in the last bit."""
        if not steps:
            return HealthStatus()
        local = [step.step if step else 0 for step in (bad, spike)]
        agreed = all_reduce_no_grad(torch.tensor([*local, too_many]), self._world, "max")
        bad_step, spike_step, too_many = agreed.tolist()
        by_number = {step.step: step for step in (*self._history, *steps)}
        before = max((number for number in by_number if number < spike_step), default=0)
        return HealthStatus(
            by_number.get(bad_step), by_number.get(spike_step), by_number.get(before), bool(too_many)
        )
