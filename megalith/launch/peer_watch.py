"""Failure detection between launchers while their ranks connect.

If a rank dies before the ranks are connected, the others would wait for their timeout, because no connection exists yet
that could break. Each launcher that fails for good therefore publishes its error in the rendezvous store, and each
launcher checks the heartbeat of the next one. A launcher stops checking once its ranks are connected.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path

from torch.distributed import Store

CONNECTED_FILE = "MEGALITH_CONNECTED_FILE"  # environment variable: a file that gets a byte per connected rank
POLL_INTERVAL = 1.0  # seconds
MAX_MISSED_BEATS = 60  # polls without a new heartbeat after which a launcher counts as lost
RELAY_TIMEOUT = 15.0  # seconds that the launcher serving the store waits for the others to read its error
CONNECTED = b"connected"


class PeerWatch:
    """Publishes a launcher's heartbeat and monitors those of the other launchers.

    Args:
        store: store of this rendezvous round.
        rank: this launcher's rank among `machines`.
        machines: number of launchers.
        connected: file to which each rank appends a byte once it is connected (variable CONNECTED_FILE).
        ranks: number of ranks on this machine.
    """

    FAILED, ACKNOWLEDGED = "megalith/failed", "megalith/acknowledged"

    def __init__(self, store: Store, rank: int, machines: int, connected: Path, ranks: int):
        self._store, self._rank, self._machines = store, rank, machines
        self._connected, self._ranks = connected, ranks
        self._beats, self._next_poll = 0, 0.0
        self._last_beat, self._last_beat_at, self._missed = b"", time.monotonic(), 0
        self.is_done = machines == 1

    def poll(self) -> str:
        """Return the reason why this machine's ranks can never connect, or an empty string."""
        now = time.monotonic()
        if self.is_done or now < self._next_poll:
            return ""
        self._next_poll = now + POLL_INTERVAL
        try:
            if self._connected.exists() and self._connected.stat().st_size >= self._ranks:
                self._store.set(self._key(self._rank), CONNECTED.decode())
                self.is_done = True
                return ""
            self._beats += 1
            self._store.set(self._key(self._rank), f"{self._beats} {socket.gethostname()}")
            if not self._store.check([self.FAILED]):
                self._check_next(now)
            if self._store.check([self.FAILED]):
                self._store.add(self.ACKNOWLEDGED, 1)
                return self._store.get(self.FAILED).decode()
        except RuntimeError:  # torch's store errors
            return "the launcher that serves the rendezvous has ended or can no longer be reached; see its output"
        return ""

    def _check_next(self, now: float) -> None:
        """Publish a failure if the next launcher has missed too many heartbeats.

        Missed polls are counted rather than seconds: a launcher that was suspended itself must not blame the others.
        """
        other = (self._rank + 1) % self._machines
        key = self._key(other)
        beat = self._store.get(key) if self._store.check([key]) else b""
        if beat != self._last_beat or beat == CONNECTED:
            self._last_beat, self._last_beat_at, self._missed = beat, now, 0
            return
        self._missed += 1
        if self._missed > MAX_MISSED_BEATS:
            host = beat.decode().partition(" ")[2] or f"number {other}"
            self._store.set(
                self.FAILED,
                f"no heartbeat for {now - self._last_beat_at:.0f} s from the launcher on machine {host} while the "
                "ranks connect",
            )

    def publish_failure(self, message: str, serves_store: bool) -> None:
        """Publish the reason why the job has failed.

        The launcher that serves the store waits until the others have received it.
        """
        if self.is_done:
            return
        with suppress(RuntimeError):
            if not self._store.check([self.FAILED]):
                self._store.set(self.FAILED, f"on machine {socket.gethostname()}: {message}")
            deadline = time.monotonic() + (RELAY_TIMEOUT if serves_store else 0)
            while self._store.add(self.ACKNOWLEDGED, 0) < self._machines - 1 and time.monotonic() < deadline:
                time.sleep(0.1)

    def _key(self, rank: int) -> str:
        return f"megalith/heartbeat/{rank}"
