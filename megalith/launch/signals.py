"""Signals that ask a run to end, taken note of as they come and obeyed at the end of a step or an evaluation's batch.

A scheduler sends SIGTERM or SIGUSR1 some time before it kills a job, a user presses ctrl-C, a terminal or ssh that
closes sends SIGHUP. The first asks for a checkpoint and an orderly end (stops.py). A second SIGTERM or SIGINT wants the
process gone, and it goes at once, with the last checkpoint as whole as it was. The same SIGTERM may come twice, from
the scheduler and through the launcher, so one counts as the second only when the loop has acted on the first; a SIGINT
does when the user has been told that it would. Python runs a signal's handler between two of its own instructions,
which may be long after the signal when the process stands in a collective or in a write; so signals are read from a
pipe, into which they are written as they come, by a thread.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
URGENT = (signal.SIGTERM, signal.SIGINT)  # a second one of these is obeyed at once
NO_SIGNAL = b"\0"
MEETING = "before the processes of the run had found each other"
ONE_WISH = 1.0  # seconds in which the same signal counts once: a launcher and its scheduler may both send it


def handled_stop_signals() -> list[signal.Signals]:
    """The stop signals that this process was not told to ignore: under `nohup` it outlives its terminal."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


class StopSignals:
    """In its `with`, `received` is the first stop signal that came, None before. Elsewhere than in the main thread
    signals stay what they were: Python takes them there only. One that `announces` says on stderr what it took, and
    whether the run `saves` then."""

    def __init__(self, announces: bool = True, saves: bool = True) -> None:
        self.received: signal.Signals | None = None
        self._announces, self._saves = announces, saves
        self._came: dict[int, float] = {}  # when each signal came first
        self._obeyed: float | None = None
        self._meeting = False

    @contextmanager
    def during_rendezvous(self) -> Iterator[None]:
        """In it, while the processes of the run find each other, a signal ends this one at once: those that it waits
        for may never come, and there is no step yet whose end could be the run's."""
        self._meeting = True
        if self.received is not None:
            _leave(self.received, f"{self.received.name} {MEETING}")
        try:
            yield
        finally:
            self._meeting = False

    def acknowledge(self) -> None:
        """To be called by the loop when it has seen that it is to end: what comes from now on is another wish."""
        self._obeyed = self._obeyed or time.monotonic()

    def __enter__(self) -> StopSignals:
        self._listening = threading.current_thread() is threading.main_thread()
        if self._listening:
            self._read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            self._handlers = {number: signal.signal(number, _note) for number in handled_stop_signals()}
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
            if byte[0] in self._handlers:
                self._take(signal.Signals(byte[0]))

    def _take(self, number: signal.Signals) -> None:
        if self._meeting:
            _leave(number, f"{number.name} {MEETING}")
        now = time.monotonic()
        is_new = number not in self._came
        first = self._came.setdefault(number, now)
        self.received = self.received or number
        if is_new and self._announces:
            again = "; again: at once" if number is signal.SIGINT else ""
            print(
                f"{number.name}: stopping after this step, with{'' if self._saves else 'out'} a checkpoint{again}",
                file=sys.stderr,
                flush=True,
            )
        if number in URGENT and now - first > ONE_WISH and self._knows_of(number, first):
            _leave(number, f"a second {number.name}: leaving at once, without a checkpoint")

    def _knows_of(self, number: signal.Signals, first: float) -> bool:
        """Whether who sends a signal again has reason to: the loop acts on it, or it was a user's, who was asked to."""
        return number is signal.SIGINT or (self._obeyed is not None and first <= self._obeyed)


def _leave(number: signal.Signals, why: str) -> None:
    print(f"error: {why}", file=sys.stderr, flush=True)
    os._exit(128 + number)


def _note(number: int, frame: object) -> None:
    """The handler: its being there is what makes Python write the signal into the pipe."""
