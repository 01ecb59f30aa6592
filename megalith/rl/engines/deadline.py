"""Time limits: deadlines, and threads for calls that have no time-out.

Broadcasts need a thread, because they wait forever if a worker has died. Requests need a deadline, because a socket's
time-out restarts with each received byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Thread
from typing import Any


class Deadline:
    """A point in time after which requests fail. `setting` names the config key of the time limit; errors quote it."""

    def __init__(self, seconds: float, setting: str):
        self.seconds, self.setting = seconds, setting
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the remaining seconds, at least 0.001."""
        return max(self._end - time.monotonic(), 1e-3)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end


class InThread:
    """A call in a daemon thread."""

    def __init__(self, act: Callable[[], Any]):
        self._act = act
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._act()
        except BaseException as error:
            self._error = error

    def wait(self, seconds: float) -> bool:
        """Return True if the call ends within `seconds`."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> Any:
        """Wait for the call and return its result, or raise its exception."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result
