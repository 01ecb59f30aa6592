"""Stop signals: SIGTERM, SIGUSR1, SIGINT and SIGHUP end a run after the current step or evaluation batch.

The first signal requests a checkpoint and an orderly end (stops.py). A second SIGTERM or SIGINT exits at once, without
a checkpoint. The scheduler and the launcher may both deliver the same SIGTERM, so a SIGTERM counts as the second only
after the training loop has acted on the first. A second SIGINT counts once the notice about it has been printed.

Python runs signal handlers between bytecode instructions, which may be long after the signal if the process waits in a
collective or a write. Signals are therefore written to a pipe, which a thread reads.
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
IMMEDIATE = (signal.SIGTERM, signal.SIGINT)  # the second one exits at once
NO_SIGNAL = b"\0"
BEFORE_RENDEZVOUS = "before the processes of the run had found each other"
REPEAT_WINDOW = 1.0  # seconds in which the same signal counts once


def handled_stop_signals() -> list[signal.Signals]:
    """Return the stop signals that this process does not ignore. `nohup` ignores SIGHUP."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


class StopSignals:
    """Context manager that handles stop signals. Outside the main thread it does nothing, as Python requires.

    Args:
        announces: print a notice to stderr on the first signal.
        saves: the run saves a checkpoint when stopped; part of the notice.

    Attributes:
        received: first stop signal, or None.
    """

    def __init__(self, announces: bool = True, saves: bool = True) -> None:
        self.received: signal.Signals | None = None
        self._announces, self._saves = announces, saves
        self._received_at: dict[int, float] = {}  # time of the first signal of each kind
        self._acknowledged_at: float | None = None
        self._in_rendezvous = False

    @contextmanager
    def during_rendezvous(self) -> Iterator[None]:
        """Return a context manager in which a signal ends the process immediately.

        No step runs yet, and other processes may never connect.
        """
        self._in_rendezvous = True
        if self.received is not None:
            _exit_now(self.received, f"{self.received.name} {BEFORE_RENDEZVOUS}")
        try:
            yield
        finally:
            self._in_rendezvous = False

    def acknowledge(self) -> None:
        """Record that the training loop has handled the signal. A later signal is a new request."""
        self._acknowledged_at = self._acknowledged_at or time.monotonic()

    def __enter__(self) -> StopSignals:
        self._listening = threading.current_thread() is threading.main_thread()
        if self._listening:
            self._read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            self._handlers = {
                number: signal.signal(number, _noop_handler) for number in handled_stop_signals()
            }
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
            os.write(
                self._write, NO_SIGNAL
            )  # closing is not enough: a forked data worker may hold the pipe open
            self._thread.join()
            os.close(self._write)
            os.close(self._read)

    def _listen(self) -> None:
        while (byte := os.read(self._read, 1)) != NO_SIGNAL:
            if byte[0] in self._handlers:
                self._handle(signal.Signals(byte[0]))

    def _handle(self, number: signal.Signals) -> None:
        if self._in_rendezvous:
            _exit_now(number, f"{number.name} {BEFORE_RENDEZVOUS}")
        now = time.monotonic()
        is_new = number not in self._received_at
        first = self._received_at.setdefault(number, now)
        self.received = self.received or number
        if is_new and self._announces:
            again = "; again: at once" if number is signal.SIGINT else ""
            print(
                f"{number.name}: stopping after this step, with{'' if self._saves else 'out'} a checkpoint{again}",
                file=sys.stderr,
                flush=True,
            )
        if number in IMMEDIATE and now - first > REPEAT_WINDOW and self._is_second_request(number, first):
            _exit_now(number, f"a second {number.name}: exiting at once, without a checkpoint")

    def _is_second_request(self, number: signal.Signals, first: float) -> bool:
        """Return True if a repeated signal is a new request: a SIGINT, or any signal after the loop has handled the
        first.
        """
        return number is signal.SIGINT or (
            self._acknowledged_at is not None and first <= self._acknowledged_at
        )


def _exit_now(number: signal.Signals, message: str) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(128 + number)


def _noop_handler(number: int, frame: object) -> None:
    """Signal handler. Python writes a signal to the wakeup pipe only if a handler is installed."""
