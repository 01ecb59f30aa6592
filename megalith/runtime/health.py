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

from megalith.comm import Axis, summed
from megalith.config import RunConfig
from megalith.errors import TrainingError


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

    @property
    def first_sample(self) -> int:
        """Samples consumed before the step."""
        return self.consumed_samples - self.batch_size


@dataclass(frozen=True)
class Verdict:
    """What the last steps read call for; a healthy run's has nothing."""

    lost: ReadStep | None = None
    """The first of a row of steps with NaN or Inf."""

    spike: ReadStep | None = None
    before_spike: ReadStep | None = None
    """The step whose update came last before the spike's forward pass."""


class Health:
    """Judges every step once, in order, on all ranks alike."""

    def __init__(self, config: RunConfig, world: Axis):
        runtime, optim = config.runtime, config.optim
        self._world, self._most = world, runtime.max_bad_steps
        self._threshold = runtime.loss_spike_threshold
        self._history: deque[ReadStep] = deque(maxlen=runtime.loss_spike_window)
        dynamic = config.train.precision == "fp16" and optim.loss_scale is None
        self._least_scale = optim.min_loss_scale if dynamic else math.inf
        self._bad_steps: list[int] = []  # in a row

    def judge(self, steps: Sequence[ReadStep]) -> Verdict:
        """Raises TrainingError, on all ranks, when too many steps in a row were lost."""
        lost = spike = before = None
        for step in steps:
            if self.is_lost(step.loss, step.skipped, step.loss_scale):
                lost = lost or (step if not self._bad_steps else None)
                self._bad_steps.append(step.step)
                if len(self._bad_steps) == self._most:
                    break
                continue
            self._bad_steps.clear()
            if self.is_spike(step.loss) and spike is None:
                spike, before = step, self._history[-1]
            elif spike is None:
                self._history.append(step)
        enough = len(self._bad_steps) >= self._most
        return self._agreed(steps, Verdict(lost, spike, before), enough)

    def is_lost(self, loss: float, skipped: bool, loss_scale: float) -> bool:
        """Whether a step is lost to NaN or Inf, and not to a loss scale that is still falling."""
        return not math.isfinite(loss) or (skipped and loss_scale <= self._least_scale)

    def is_spike(self, loss: float) -> bool:
        """Whether a loss is so many times the mean of a whole window before it."""
        if self._threshold is None or len(self._history) < self._history.maxlen:
            return False
        return loss > self._threshold * sum(step.loss for step in self._history) / len(self._history)

    def went_back(self, step: int) -> None:
        """Forgets the steps after `step`, which are going to be made again."""
        kept = [one for one in self._history if one.step <= step]
        self._history.clear()
        self._history.extend(kept)
        self._bad_steps.clear()

    def accept(self, step: ReadStep) -> None:
        """Takes a spike as what losses are like now."""
        self._history.append(step)

    def _agreed(self, steps: Sequence[ReadStep], verdict: Verdict, enough: bool) -> Verdict:
        """What one rank found holds for all, though a last bit may differ between them."""
        if not steps:
            return verdict
        by_number = {step.step: step for step in steps}
        found = [step.step if step else 0 for step in (verdict.lost, verdict.spike)]
        lost, spike, enough = summed(torch.tensor([*found, enough]), self._world, "max").tolist()
        if enough:
            raise TrainingError(
                f"NaN or Inf in the loss or the gradients of {self._most} steps in a row, up to step {steps[-1].step} "
                "(runtime.max_bad_steps); they changed no weights. events.jsonl names where the first began; lower "
                "optim.lr, or look at the data, and go on from a checkpoint"
            )
        before = verdict.before_spike or (self._history[-1] if spike else None)
        return Verdict(by_number.get(lost), by_number.get(spike), before)
