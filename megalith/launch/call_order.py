"""Calls that every rank of a script makes in the same order; ranks that wait in different ones end with a sentence.

A script that calls `unwrap_model` on its main process alone would wait forever: the others wait for it elsewhere. A
thread of each rank publishes the last calls of a rank that has been in one for some seconds, and at the script's end.
Once every rank waits or has ended, ranks whose calls of one number have different names can never go on.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.distributed import PrefixStore, Store, distributed_c10d

from megalith.errors import ConfigError
from megalith.launch.failure import report

PATIENCE = 3.0  # seconds in a call after which its rank says so
LOOK = 1.0  # seconds between two looks at the others
AT_END = 10.0  # seconds that a rank at the end of the script waits for the others
KEPT = 16  # calls of a rank that the others can compare
END = "the end of the script"
Calls = Mapping[str, str]  # the number of a call, as JSON has it, and its name


class CallOrder:
    """This rank's calls, and the thread that compares them. Every rank makes one at the same point."""

    def __init__(self, rank: int, world_size: int, store: Store):
        """`store`: a connection for this object alone."""
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
        """A call of this name, unless it is part of another."""
        if not self._depth:
            self._calls.append(name)
            self._count, self._since = self._count + 1, time.monotonic()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _watch(self) -> None:
        with suppress(RuntimeError):  # the store has ended, and with it another rank
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
        """By rank; empty for one that waits in no call."""
        keys = [str(rank) for rank in range(self._world_size)]
        return [json.loads(self._store.get(key)) if self._store.check([key]) else {} for key in keys]

    def _compare(self) -> None:
        calls, text = self._others(), None
        if all(calls):
            text = differing_calls(calls)
        if text is None:
            return
        if self._store.add("reports", 1) > 1:
            time.sleep(LOOK)  # for the rank that reports
            os._exit(ConfigError.exit_code)
        os._exit(report(ConfigError(text)))

    def _end(self) -> None:
        """Wait for the ranks that are still in a call: the script's end is none of theirs."""
        if getattr(sys, "last_value", None) is not None:  # an error has ended the script
            return
        with suppress(RuntimeError), self.call(END):
            self._publish(self._recent())
            before = time.monotonic()
            while time.monotonic() - before < AT_END and not all(
                END in calls.values() for calls in self._others()
            ):
                time.sleep(LOOK / 10)


def differing_calls(calls: list[Calls]) -> str | None:
    """Return the sentence for ranks, by number, whose calls differ; None where they do not."""
    for number in sorted({int(number) for one in calls for number in one}):
        names: dict[str, list[int]] = {}
        for rank, one in enumerate(calls):
            if str(number) in one:
                names.setdefault(one[str(number)], []).append(rank)
        if len(names) > 1:
            parts = [
                f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} in {name}"
                for name, ranks in names.items()
            ]
            return (
                f"the ranks wait for each other in different calls: {'; '.join(parts)}. Every rank has to make each of "
                "these calls, in one order: take the one that some ranks leave out from under its condition (such as "
                "`if accelerator.is_main_process:`), and keep there what writes or prints"
            )
    return None


def own_connection(timeout: timedelta) -> Store:
    """Return a connection to the store that the ranks met at, for another thread than the main one."""
    store = distributed_c10d._get_default_store().clone()
    store.set_timeout(timeout)
    return store
