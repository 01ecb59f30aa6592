"""Stopping a run on a signal or a time limit: all ranks stop after the same step, and the exit code gives the reason.

Signals and time limits reach the ranks at different moments. Each rank therefore starts an asynchronous all-reduce of
its stop reason on the host before each step and each evaluation batch, and reads the result afterwards. The device is
never waited for, and a run stops at most one step after a signal. A stop request aborts an evaluation in progress.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor

from megalith.comm.collectives import Axis, begin_all_reduce, wait
from megalith.config import TrainConfig
from megalith.launch.signals import StopSignals

STOP_CODE_FILE = "MEGALITH_STOP_CODE_FILE"

EXIT_CODES = {
    "train_iters": 0,
    "exit_interval": 20,
    "exit_duration_in_mins": 21,
    "SIGTERM": 22,
    "SIGUSR1": 23,
    "SIGINT": 24,
    "SIGHUP": 25,
}
"""Exit code by the reason for the end: 0 after the last step, 20 to 25 for an early end with a checkpoint."""

STOP_REASONS = (
    "",
    "exit_duration_in_mins",
    "SIGINT",
    "SIGHUP",
    "SIGUSR1",
    "SIGTERM",
)  # later ones take priority


class Stops:
    """Agreement of all ranks on an early end.

    Every rank calls `before_work` and `after_work` around each step and each evaluation batch.

    Args:
        limits: exit interval and duration.
        world: axis of all ranks.
        signals: stop signals; None ignores them.

    Attributes:
        stop_reason: signal or time limit for which the run ends, a key of EXIT_CODES, the same on every rank; or None.
    """

    def __init__(self, limits: TrainConfig, world: Axis, signals: StopSignals | None = None):
        self._limits, self._world, self._signals = limits, world, signals
        self._started = time.monotonic()
        self._answer: Tensor | None = None
        self.stop_reason: str | None = None

    def before_work(self) -> None:
        if self._world.size > 1:
            self._answer = begin_all_reduce(torch.tensor([self._local_reason()]), self._world, "max")

    def after_work(self) -> str | None:
        """Update and return `stop_reason`, None while the run goes on."""
        reason = self._local_reason() if self._world.size == 1 else int(wait(self._answer))
        if reason and self.stop_reason is None:
            self.stop_reason = STOP_REASONS[reason]
            if self._signals is not None:
                self._signals.acknowledge()
        return self.stop_reason

    def after_step(self, step: int) -> str | None:
        """Call `after_work`.

        Returns the reason, a key of EXIT_CODES, if the run must stop after `step`, otherwise None.
        """
        interval = self._limits.exit_interval
        return self.after_work() or ("exit_interval" if interval and step % interval == 0 else None)

    def _local_reason(self) -> int:
        """Return the index in STOP_REASONS of this rank's own reason to stop."""
        if self._signals is not None and self._signals.received is not None:
            return STOP_REASONS.index(self._signals.received.name)
        minutes = self._limits.exit_duration_in_mins
        over = minutes is not None and time.monotonic() - self._started > 60 * minutes
        return int(over)


def exit_code(ended: str) -> int:
    """Return the process's exit code. A launched worker returns 0 and writes its code for `megalith train --nproc`.

    Elastic launchers treat any other code as a failure: they kill the other ranks while these are exiting, and may
    restart the job.
    """
    code = EXIT_CODES[ended]
    if path := os.environ.get(STOP_CODE_FILE):
        Path(path).write_text(str(code), encoding="ascii")
        return 0
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else code
