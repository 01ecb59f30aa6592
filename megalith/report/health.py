"""What is wrong with a step by its figures: a loss or gradient that is lost, or a loss far above those before it.

Figures come from the device at the log's interval, so judging them costs no wait of its own; a bad step is then known
some steps late, never its update applied: the optimizer has left that out (optim/step.py). A dynamic loss scale that
still falls is no fault, for it is how fp16 finds its scale.
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
    """A step's figures, on the host, the same on every rank."""

    step: int
    consumed_samples: int
    """After the step."""
    batch_size: int
    loss: float
    grad_norm: float
    skipped: bool
    loss_scale: float
    num_zeros: float | None = None
    params_norm: float | None = None

    @property
    def first_sample(self) -> int:
        """Samples consumed before the step."""
        return self.consumed_samples - self.batch_size


@dataclass(frozen=True)
class HealthStatus:
    """What the last steps read call for; a healthy run's has nothing."""

    bad_step: ReadStep | None = None
    """The first of a row of steps with NaN or Inf."""

    spike: ReadStep | None = None
    """The first step with a loss far above those before it."""

    step_before_spike: ReadStep | None = None
    """The step before the spike, whose update its forward pass was the first to see."""

    too_many_bad_steps: bool = False
    """So many steps in a row were lost that the run should end."""


class HealthMonitor:
    """Judges every step once, in order, on all ranks alike."""

    def __init__(self, config: RunConfig, world: Axis):
        runtime, optim = config.runtime, config.optim
        self._world, self._most = world, runtime.max_bad_steps
        self._threshold = runtime.loss_spike_threshold
        self._history: deque[ReadStep] = deque(maxlen=runtime.loss_spike_window)
        dynamic = config.train.precision == "fp16" and optim.loss_scale is None
        self._least_scale = optim.min_loss_scale if dynamic else math.inf
        self._bad_steps: list[int] = []  # in a row

    def check(self, steps: Sequence[ReadStep]) -> HealthStatus:
        """What `steps`, read since the last call, call for."""
        lost = spike = None
        for step in steps:
            if self.is_bad_step(step.loss, step.skipped, step.loss_scale):
                lost = lost or (step if not self._bad_steps else None)
                self._bad_steps.append(step.step)
                if len(self._bad_steps) == self._most:
                    break
                continue
            self._bad_steps.clear()
            if self.is_loss_spike(step.loss) and spike is None:
                spike = step
            elif spike is None:
                self._history.append(step)
        enough = len(self._bad_steps) >= self._most
        return self._agreed(steps, lost, spike, enough)

    def is_bad_step(self, loss: float, skipped: bool, loss_scale: float) -> bool:
        """Whether a step is lost to NaN or Inf, and not to a loss scale that is still falling."""
        return not math.isfinite(loss) or (skipped and loss_scale <= self._least_scale)

    def is_loss_spike(self, loss: float) -> bool:
        """Whether a loss is so many times the mean of a whole window before it."""
        if self._threshold is None or len(self._history) < self._history.maxlen:
            return False
        return loss > self._threshold * sum(step.loss for step in self._history) / len(self._history)

    def rewind_history(self, step: int) -> None:
        """Forgets the steps after `step`, which are going to be made again."""
        kept = [one for one in self._history if one.step <= step]
        self._history.clear()
        self._history.extend(kept)
        self._bad_steps.clear()

    def accept_spike(self, step: ReadStep) -> None:
        """Takes a spike as what losses are like now."""
        self._history.append(step)

    def _agreed(
        self, steps: Sequence[ReadStep], lost: ReadStep | None, spike: ReadStep | None, enough: bool
    ) -> HealthStatus:
        """What one rank found holds for all, though a last bit may differ between them."""
        if not steps:
            return HealthStatus()
        found = [step.step if step else 0 for step in (lost, spike)]
        first = all_reduce_no_grad(torch.tensor([*found, enough]), self._world, "max")
        lost_step, spike_step, enough = first.tolist()
        by_number = {step.step: step for step in (*self._history, *steps)}
        before = max((number for number in by_number if number < spike_step), default=0)
        return HealthStatus(
            by_number.get(lost_step), by_number.get(spike_step), by_number.get(before), bool(enough)
        )
