"""Detection of ranks that wait in different collective calls of a script.

A script that calls `unwrap_model` only on its main process would hang: the other ranks wait in another call. A thread
of each rank publishes the rank's last calls once a call has taken some seconds, or once the rank has reached the
script's end. When every rank waits or has ended, the calls are compared by their number. If calls with the same number
have different names, the job ends with an error.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from megalith.compat.process_groups import default_store
from megalith.errors import ConfigError
from megalith.launch.failure import is_failing, report

PATIENCE = 3.0  # seconds in a call after which its rank publishes it
LOOK = 1.0  # seconds between two checks
AT_END = 10.0  # seconds that a rank at the end of the script waits for the others
KEPT = 16  # number of last calls that are compared
END = "the end of the script"
Calls = Mapping[str, str]  # name of a call by its number, a decimal string


class CallOrder:
    """Calls of this rank, and the thread that compares them. Every rank creates one at the same point.

    Args:
        rank: this rank.
        world_size: number of ranks.
        store: a connection that only this object uses.
    """

    def __init__(self, rank: int, world_size: int, store: Store):
        self._rank, self._world_size = rank, world_size
        self._store = PrefixStore(f"calls {store.add(f'calls of {rank}', 1)}", store)
        self._calls: deque[str] = deque(maxlen=KEPT)
        self._count = self._depth = 0
        self._since = 0.0
        self._is_published = False
        threading.Thread(target=self._watch, name="call order", daemon=True).start()
        atexit.register(self._end)

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Record a call of this name, unless it is nested in another."""
        if not self._depth:
            self._calls.append(name)
            self._count, self._since = self._count + 1, time.monotonic()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _watch(self) -> None:
        with suppress(RuntimeError):  # the store is gone because another rank has ended
            while True:
                time.sleep(LOOK)
                if self._depth and time.monotonic() - self._since > PATIENCE:
                    self._publish(self._recent())
                    self._compare()
                elif self._is_published:
                    self._publish({})

    def _recent(self) -> Calls:
        names = list(self._calls)
        return {str(self._count - len(names) + 1 + n): name for n, name in enumerate(names)}

    def _publish(self, calls: Calls) -> None:
        self._store.set(str(self._rank), json.dumps(calls))
        self._is_published = bool(calls)

    def _others(self) -> list[Calls]:
        """Return the calls that each rank has published.

        The list is empty for a rank that is not waiting in a call.
        """
        keys = [str(rank) for rank in range(self._world_size)]
        return [json.loads(self._store.get(key)) if self._store.check([key]) else {} for key in keys]

    def _compare(self) -> None:
        calls, text = self._others(), None
        if all(calls):
            text = differing_calls(calls)
        if text is None:
            return
        if self._store.add("reports", 1) > 1:
            time.sleep(LOOK)  # another rank reports
            os._exit(ConfigError.exit_code)
        os._exit(report(ConfigError(text)))

    def _end(self) -> None:
        """Wait at the end of the script, at most AT_END seconds, until all ranks reach it.

        `_watch` meanwhile reports ranks that are still in another call.
        """
        if is_failing():
            return
        with suppress(RuntimeError), self.call(END):
            self._publish(self._recent())
            before = time.monotonic()
            while time.monotonic() - before < AT_END and not all(
                END in calls.values() for calls in self._others()
            ):
                time.sleep(LOOK / 10)


def differing_calls(calls: list[Calls]) -> str | None:
    """Return an error message if the ranks' calls differ, otherwise None."""
    for number in sorted({int(number) for rank_calls in calls for number in rank_calls}):
        names: dict[str, list[int]] = {}
        for rank, rank_calls in enumerate(calls):
            if str(number) in rank_calls:
                names.setdefault(rank_calls[str(number)], []).append(rank)
        if len(names) > 1:
            parts = [
                f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} in {name}"
                for name, ranks in names.items()
            ]
            return (
                f"the ranks wait for each other in different calls: {'; '.join(parts)}. Every rank must make all of "
                "these calls, in the same order: move the call that some ranks skip out of its condition (such as "
                "`if accelerator.is_main_process:`), and leave only writing and printing inside"
            )
    return None


def clone_store(timeout: timedelta) -> Store:
    """Open another connection to the ranks' store, for a thread other than the main one."""
    store = default_store().clone()
    store.set_timeout(timeout)
    return store
