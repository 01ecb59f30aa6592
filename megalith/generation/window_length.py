"""Number of decode steps per window of a live engine.

A request waits for the windows that have been launched before it, and its row is idle for one or two windows after its
end. Short windows shorten both, but the host needs time per window. They are therefore used while the host spends most
of its time waiting for the GPU.
"""

from __future__ import annotations

LEAST = 4  # steps
WINDOWS = 16  # per decision
# Fractions of the time that the host waits, above which windows are halved, and below which they are doubled.
MANY, FEW = 0.6, 0.2


class WindowLength:
    """Chooses the number of steps of the next window."""

    def __init__(self, most: int):
        """Start with `most` steps, the maximum."""
        self.steps = self._most = most
        self._least = min(LEAST, most)
        self._windows, self._waited, self._elapsed = 0, 0.0, 0.0

    def record(self, waited: float, elapsed: float) -> None:
        """Record a window: the seconds that the host waited for the GPU, out of the `elapsed` ones."""
        self._windows += 1
        self._waited += waited
        self._elapsed += elapsed
        if self._windows < WINDOWS:
            return
        if self._waited > MANY * self._elapsed:
            self.steps = max(self._least, self.steps // 2)
        elif self._waited < FEW * self._elapsed:
            self.steps = min(self._most, self.steps * 2)
        self._windows, self._waited, self._elapsed = 0, 0.0, 0.0
