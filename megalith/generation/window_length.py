"""Number of decode steps per window of a live engine.

A request waits for the windows that have been launched before it, and its row is idle for one or two windows after its
end. Short windows shorten both, but the host needs time per window, and a GPU whose windows have all ended waits for
the host. Windows are therefore short while the host has time to spare, and long once it comes late.
"""

from __future__ import annotations

LEAST = 4  # steps
WINDOWS = 16  # per decision
SPARE = 0.6  # fraction of the time that the host waits for the GPU, above which windows are halved
LATE = 1e-4  # seconds; if the host waits less for a window, it has come late
LATE_WINDOWS = 1  # per decision; if more of them were late, windows are doubled


class WindowLength:
    """Chooses the number of steps of the next window."""

    def __init__(self, most: int):
        """Start with `most` steps, the maximum."""
        self.steps = self._most = most
        self._least = min(LEAST, most)
        self._start()

    def _start(self) -> None:
        self._windows = self._late = 0
        self._waited = self._elapsed = 0.0

    def record(self, waited: float, elapsed: float) -> None:
        """Record a window: the seconds that the host waited for the GPU, out of the `elapsed` ones."""
        self._windows += 1
        self._late += waited < LATE
        self._waited += waited
        self._elapsed += elapsed
        if self._windows < WINDOWS:
            return
        if self._late > LATE_WINDOWS:
            self.steps = min(self._most, self.steps * 2)
        elif self._waited > SPARE * self._elapsed:
            self.steps = max(self._least, self.steps // 2)
        self._start()
