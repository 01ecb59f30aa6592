"""Standard output and standard error that ignore failed writes. A lost terminal does not end a run.

Writes fail if `| head` closes the pipe, if the terminal or the program after `| tee` dies, or if a quota is full. The
text is then dropped, with one warning on standard error. metrics.jsonl still gets all metrics.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class GuardedStream:
    """Wraps `stream`. Its writes never raise."""

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

    def _try(self, call: Any, *text: str) -> None:
        try:
            call(*text)
        except (OSError, ValueError) as error:  # ValueError: the file is closed or cannot encode a character
            if not self.failed:
                self.failed = True
                message = (
                    f"{self._name} cannot be written ({error}); the command continues, and a run "
                    "still writes logs to its folder"
                )
                print(f"warning: {message}", file=sys.stderr)


@contextlib.contextmanager
def guard_standard_streams() -> Iterator[None]:
    """Replace sys.stdout and sys.stderr by guarded streams.

    A stream that has failed stays guarded afterwards: the interpreter flushes it at exit, and an error there would
    change the exit code.
    """
    before = sys.stdout, sys.stderr
    sys.stdout = _guarded(sys.stdout, "standard output")
    sys.stderr = _guarded(sys.stderr, "standard error")
    within = sys.stdout, sys.stderr
    try:
        yield
    finally:
        for name, old, new in zip(("stdout", "stderr"), before, within):
            new.flush()
            if getattr(sys, name) is new and not new.failed and old is not None:
                setattr(sys, name, old)


def _guarded(stream: TextIO | GuardedStream | None, name: str) -> GuardedStream:
    if isinstance(stream, GuardedStream):
        return stream
    if stream is None:
        # It was closed when the process started. Opening /dev/null takes its descriptor, so that no other file gets it.
        stream = os.fdopen(os.open(os.devnull, os.O_RDWR), "w", encoding="utf-8")
    return GuardedStream(stream, name)
