"""When a run ends before its last step, all ranks after the same one, and the exit code that says why.

Every rank knows for itself that a signal came or that its time is up, at different moments. So at the head of each
step, and of each batch of an evaluation, a rank gives what it wishes into one small all-reduce on the host, which goes
on meanwhile, and after it all of them read the same answer: nothing waits for the device, and a signal is obeyed at the
latest a step later. An evaluation is broken off.
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
"""Why a run ended, and what the process exits with: 0 is the end of the training, 20 to 25 a checkpoint on the way."""

WISHES = ("", "exit_duration_in_mins", "SIGINT", "SIGHUP", "SIGUSR1", "SIGTERM")  # of several the last counts


class Stops:
    """`before_work` and `after_work` of every step and every batch of an evaluation, on every rank of `world`."""

    def __init__(self, limits: TrainConfig, world: Axis, signals: StopSignals | None = None):
        """Without `signals` none is obeyed. The minutes count from here."""
        self._limits, self._world, self._signals = limits, world, signals
        self._started = time.monotonic()
        self._answer: Tensor | None = None
        self.stop_reason: str | None = None
        """The signal, or the minutes, that the run is to end for now: a key of EXIT_CODES, the same on every rank."""

    def before_work(self) -> None:
        if self._world.size > 1:
            self._answer = begin_all_reduce(torch.tensor([self._wish()]), self._world, "max")

    def after_work(self) -> str | None:
        """`stop_reason` as it is now."""
        wish = self._wish() if self._world.size == 1 else int(wait(self._answer))
        if wish and self.stop_reason is None:
            self.stop_reason = WISHES[wish]
            if self._signals is not None:
                self._signals.acknowledge()
        return self.stop_reason

    def after_step(self, step: int) -> str | None:
        """`after_work`, and why the run ends after `step`: a key of EXIT_CODES, or None; the same on every rank."""
        interval = self._limits.exit_interval
        return self.after_work() or ("exit_interval" if interval and step % interval == 0 else None)

    def _wish(self) -> int:
        if self._signals is not None and self._signals.received is not None:
            return WISHES.index(self._signals.received.name)
        minutes = self._limits.exit_duration_in_mins
        over = minutes is not None and time.monotonic() - self._started > 60 * minutes
        return int(over)


def exit_code(ended: str) -> int:
    """What the process exits with. A launched worker exits with 0 and hands its code to `megalith train --nproc`.

    Elastic launchers take any other code for a failure, stop the other ranks in the midst of their own ending, and
    may start the job again.
    """
    code = EXIT_CODES[ended]
    if path := os.environ.get(STOP_CODE_FILE):
        Path(path).write_text(str(code), encoding="ascii")
        return 0
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else code
