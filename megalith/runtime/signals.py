"""Signals that ask a run to end: SIGTERM, SIGUSR1 and SIGINT, taken note of and obeyed at the end of a step.

A scheduler sends SIGTERM or SIGUSR1 some time before it kills a job, a user presses ctrl-C. The first asks for a
checkpoint and an orderly end (stops.py); a second SIGTERM or SIGINT wants the process gone, and it goes at once, with
the last checkpoint as whole as it was. Python runs a signal's handler between two of its own instructions, which may
be long after the signal when the process stands in a collective or in a write; so signals are read from a pipe, into
which they are written as they come, by a thread.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import TracebackType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
URGENT = (signal.SIGTERM, signal.SIGINT)  # a second one of these is obeyed at once
NO_SIGNAL = b"\0"
ONE_WISH = 1.0  # seconds in which the same signal counts once: a launcher and its scheduler may both send it


class StopSignals:
    """In its `with`, `asked` is the first stop signal that came, None before. Elsewhere than in the main thread
    signals stay what they were: Python takes them there only."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._came: dict[int, float] = {}  # when each signal came first

    def __enter__(self) -> StopSignals:
        self._listening = threading.current_thread() is threading.main_thread()
        if self._listening:
            self._read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            self._handlers = {number: signal.signal(number, _note) for number in STOP_SIGNALS}
            self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._listen, name="stop signals", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listening:
            signal.set_wakeup_fd(self._wakeup)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            os.write(self._write, NO_SIGNAL)  # a forked data worker may keep the pipe open
            self._thread.join()
            os.close(self._write)
            os.close(self._read)

    def _listen(self) -> None:
        while (byte := os.read(self._read, 1)) != NO_SIGNAL:
            if byte[0] in STOP_SIGNALS:
                self._take(signal.Signals(byte[0]))

    def _take(self, number: signal.Signals) -> None:
        now = time.monotonic()
        first = self._came.setdefault(number, now)
        self.asked = self.asked or number
        if number in URGENT and now - first > ONE_WISH:
            print(f"error: a second {number.name}: leaving at once, without a checkpoint", file=sys.stderr)
            sys.stderr.flush()
            os._exit(128 + number)


def _note(number: int, frame: object) -> None:
    """The handler: its being there is what makes Python write the signal into the pipe."""
