"""Runs functions concurrently that spend most of their time waiting, such as HTTP requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Event, Thread
from typing import TypeVar

T = TypeVar("T")


def run_concurrently(acts: Sequence[Callable[[], T]], max_concurrent: int | None = None) -> list[T]:
    """Call all functions in daemon threads, `max_concurrent` at a time, and return the results in order.

    Raises the first error without waiting for the other calls.
    """
    if len(acts) == 1:
        return [acts[0]()]
    results: dict[int, T] = {}
    pending, outcomes, failed = enumerate(acts), SimpleQueue(), Event()

    def work() -> None:
        try:
            while not failed.is_set() and (item := next(pending, None)) is not None:
                results[item[0]] = item[1]()
            outcomes.put(None)
        except Exception as error:
            failed.set()
            outcomes.put(error)

    threads = [Thread(target=work, daemon=True) for _ in range(min(max_concurrent or len(acts), len(acts)))]
    for thread in threads:
        thread.start()
    for _ in threads:
        error = outcomes.get()
        if error is not None:
            raise error
    return [results[number] for number in range(len(acts))]
