"""The launcher's side of in-process restarts (in_process.py): decide whether a failed rank is replaced, and follow the
restart until all ranks train again."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping, Sequence

from megalith.launch.failure import Failure
from megalith.launch.in_process import LIMIT, REPLACEMENT
from megalith.launch.restart_store import JOINED, LOST, RestartStore

HANG_DELAY = 3.0  # seconds after a request in which a launcher replaces a rank of its machine that hangs
UNEXPECTED = 1  # exit code of a rank with an unexpected error, or that lost its peers


class RankReplacement:
    """State of the in-process restarts of one attempt, on one machine.

    Args:
        store: access to the keys of restarts in the ranks' store.
    """

    def __init__(self, store: RestartStore):
        self._store = store
        self._generation = 0
        self._has_trained = False
        self._began: float | None = None
        self._limited_from = 0.0
        self._requested_at: tuple[int, float] | None = (
            None  # generation, and when a hanging rank was seen in it
        )

    def requested(self) -> list[int]:
        """Return the ranks whose replacement other ranks have requested because they hang."""
        return self._store.requested(self._store.generation())

    def planned(self) -> list[int]:
        """Return the ranks whose planned replacement has been requested."""
        return self._store.planned(self._store.generation())

    def is_possible(self, codes: Sequence[int | None], failure: Failure | None) -> bool:
        """Return True if the failed processes can be replaced.

        Args:
            codes: exit codes of this machine's ranks; None for one that runs.
            failure: the failure that came first; None if the launcher has ended that rank to replace it.
        """
        codes_left = {code for code in codes if code is not None}
        is_local = failure is None or _is_local(failure)
        return self.has_trained() and None in codes and 0 not in codes_left and is_local

    def has_trained(self) -> bool:
        """Return True if all ranks have begun to train, so that they can restart in their processes."""
        self._has_trained = self._has_trained or self._store.all_train(self._store.generation())
        return self._has_trained

    def invite(self, world_size: int) -> None:
        """Record that the job could continue with the waiting machines, as `world_size` ranks in all."""
        if world_size != self._store.invited():
            self._store.invite(world_size)

    def resize_reason(self) -> str:
        """Return the reason for a resize that is due, LOST or JOINED, or an empty string."""
        if reason := self._store.resize_reason():
            return reason
        generation = self._store.generation()
        if self._store.is_resize_requested(generation):
            return JOINED
        if self._store.has_lost_ranks(generation) or self._hang_persists(generation):
            return LOST
        return ""

    def _hang_persists(self, generation: int) -> bool:
        """Return True if the requested replacement of a hanging rank is still missing after HANG_DELAY seconds.

        In that case, the machine of the rank's launcher is lost.
        """
        if not self._store.requested(generation):
            return False
        if self._requested_at is None or self._requested_at[0] != generation:
            self._requested_at = generation, time.monotonic()
        return time.monotonic() - self._requested_at[1] > HANG_DELAY

    def begin_resize(self, reason: str) -> int:
        """Begin a resize, which interrupts the ranks. Returns the number of earlier resizes."""
        self._start_clock()
        self._store.begin_resize(reason)
        return self._store.resizes()

    def finish_resize(self, world_size: int, ranks: Mapping[int, int]) -> None:
        """Publish the mapping from old to new rank numbers. Only one launcher calls this."""
        self._store.finish_resize(world_size, ranks)

    def set_world_size(self, world_size: int) -> None:
        """Continue with another number of ranks. They must train again within LIMIT seconds."""
        self._store.world_size, self._limited_from = world_size, time.monotonic()

    def _start_clock(self) -> None:
        if self._began is None:
            self._began = self._limited_from = time.monotonic()

    def begin(self) -> int:
        """Announce the next generation and return its number."""
        self._start_clock()
        self._generation = self._store.announce()
        return self._generation

    def follow(self) -> bool:
        """Follow the restart in progress, and report it when it is complete. Return False if it has exceeded its time
        limit.
        """
        if self._began is None:
            return True
        seconds = time.monotonic() - self._began
        if self._store.all_train(self._store.generation()):
            self._began, self._has_trained = None, True
            print(f"all ranks train again after {seconds:.1f} s", file=sys.stderr, flush=True)
            return True
        return time.monotonic() - self._limited_from < LIMIT


def _is_local(failure: Failure) -> bool:
    """Return True if a failure (a kill, a crash or a bug) concerns a single rank, so that the others can continue."""
    if failure.error is None and failure.exit_status < 0:
        return -failure.exit_status not in (signal.SIGTERM, signal.SIGINT)
    return failure.exit_code == UNEXPECTED


def replacement_variables(restart_count: int) -> Mapping[str, str]:
    """Return the environment variables of a replacement that differ from the replaced process's."""
    return {"TORCHELASTIC_RESTART_COUNT": str(restart_count), REPLACEMENT: "1"}
