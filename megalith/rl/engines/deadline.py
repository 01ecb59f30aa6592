"""Waiting that ends: a moment by which something has to be over, and a thread for what has no time-out of its own.

A broadcast waits for ever where a worker has died, and a socket's time-out begins anew with each byte that comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Thread
from typing import Any


class Deadline:
    """A moment by which something has to be over. `setting` is where its seconds stand, for errors."""

    def __init__(self, seconds: float, setting: str):
        self.seconds, self.setting = seconds, setting
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds, a thousandth at least."""
        return max(self._end - time.monotonic(), 1e-3)

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end


class InThread:
    """What a daemon thread does while its caller does something else."""

    def __init__(self, act: Callable[[], Any]):
        self._act = act
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._given = self._act()
        except BaseException as error:
            self._error = error

    def is_over(self, seconds: float) -> bool:
        """Whether it ends within so many seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> Any:
        """Waits for what it gives, or raises."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._given
