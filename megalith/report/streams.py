"""Standard output and standard error that may go away: a log is no reason to end a run.

`| head` closes a pipe, a terminal or the program behind `| tee` dies, a quota is full. What cannot be written is then
left out, and said once on standard error; metrics.jsonl has the figures all the same.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class GuardedStream:
    """`stream`, whose writes raise nothing."""

    def __init__(self, stream: TextIO, name: str):
        self._stream, self._name = stream, name
        self.failed = False

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, call: Any, *given: str) -> None:
        try:
            call(*given)
        except (
            OSError,
            ValueError,
        ) as error:  # ValueError: a file that was closed, a character it has no code for
            if not self.failed:
                self.failed = True
                told = f"{self._name} cannot be written ({error}); the command goes on, a run's log is in its folder"
                print(f"warning: {told}", file=sys.stderr)


@contextlib.contextmanager
def guard_standard_streams() -> Iterator[None]:
    """In it, and after it where one has failed, sys.stdout and sys.stderr are lasting ones.

    The interpreter flushes them at its end, which may fail as well and would change the exit code.
    """
    before = sys.stdout, sys.stderr
    sys.stdout = _lasting(sys.stdout, "standard output")
    sys.stderr = _lasting(sys.stderr, "standard error")
    within = sys.stdout, sys.stderr
    try:
        yield
    finally:
        for name, old, new in zip(("stdout", "stderr"), before, within):
            new.flush()
            if getattr(sys, name) is new and not new.failed and old is not None:
                setattr(sys, name, old)


def _lasting(stream: TextIO | GuardedStream | None, name: str) -> GuardedStream:
    if isinstance(stream, GuardedStream):
        return stream
    if (
        stream is None
    ):  # closed from the start; the lowest free descriptor, so that no file of ours gets its number
        stream = os.fdopen(os.open(os.devnull, os.O_RDWR), "w", encoding="utf-8")
    return GuardedStream(stream, name)
