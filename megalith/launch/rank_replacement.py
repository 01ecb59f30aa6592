"""The launcher's side of in-process restarts (in_process.py): decide whether a failed rank is replaced, and follow the
restart until all ranks train again."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping, Sequence

from megalith.launch.failure import Failure
from megalith.launch.in_process import LIMIT, REPLACEMENT, RestartStore

UNEXPECTED = 1  # exit code of a rank with an unexpected error, or that lost its peers


class RankReplacement:
    """State of the in-process restarts of one attempt, on one machine.

    Args:
        store: the restarts' keys in the ranks' store.
    """

    def __init__(self, store: RestartStore):
        self._store = store
        self._generation = 0
        self._has_trained = False
        self._began: float | None = None

    def requested(self) -> list[int]:
        """Return the ranks of the job whose replacement other ranks have requested because they hang."""
        return self._store.requested(self._store.generation())

    def planned(self) -> list[int]:
        """Return the ranks of the job whose planned replacement is requested."""
        return self._store.planned(self._store.generation())

    def is_possible(self, codes: Sequence[int | None], failure: Failure) -> bool:
        """Return True if the failed processes can be replaced.

        Args:
            codes: exit codes of this machine's ranks; None for one that runs.
            failure: the failure that came first.
        """
        generation = self._store.generation()
        self._has_trained = self._has_trained or self._store.all_train(generation)
        codes_left = {code for code in codes if code is not None}
        return self._has_trained and None in codes and 0 not in codes_left and _is_local(failure)

    def begin(self) -> int:
        """Announce the next generation and return its number."""
        self._began = self._began or time.monotonic()
        self._generation = self._store.announce()
        return self._generation

    def follow(self) -> bool:
        """Return False if a restart has exceeded its limit. Reports one that is complete."""
        if self._began is None:
            return True
        seconds = time.monotonic() - self._began
        if self._store.all_train(self._store.generation()):
            self._began, self._has_trained = None, True
            print(f"all ranks train again after {seconds:.1f} s", file=sys.stderr, flush=True)
            return True
        return seconds < LIMIT


def _is_local(failure: Failure) -> bool:
    """Return True if the failure concerns one rank, so that the others can continue: a kill, a crash or a bug."""
    if failure.error is None and failure.exit_status < 0:
        return -failure.exit_status not in (signal.SIGTERM, signal.SIGINT)
    return failure.exit_code == UNEXPECTED


def replacement_variables(restart_count: int) -> Mapping[str, str]:
    """Return the environment variables of a replacement that differ from the replaced process's."""
    return {"TORCHELASTIC_RESTART_COUNT": str(restart_count), REPLACEMENT: "1"}
