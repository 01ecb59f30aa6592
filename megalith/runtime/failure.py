"""Which process of a job failed first, and its own words for it.

When one rank fails, the others fail after it in their collectives, with errors that say nothing. So a worker that was
started by a launcher does not print its error: it hands it over in the file that the launcher has named to it
(torch elastic's, so torchrun shows it too) and ends at once. The launcher shows the one that came first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megalith.errors import LINES, MegalithError, printable

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
COLLECTIVE_ERRORS = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
COLLECTIVE_WORDS = ("gloo/", "Connection closed by peer", "NCCL error", "ProcessGroup")

# Torchrun takes the failure with the lowest whole second for the cause of the others; a lost connection never is.
SECONDS_AFTER = 5


def report(error: BaseException) -> int:
    """Tells of an error that ends this process, and returns its exit code.

    A MegalithError is told in its sentence, another error with its traceback, on stderr. A launched worker tells the
    launcher and does not return but ends at once: the interpreter's own ending could wait for collectives that the
    other ranks will never join.
    """
    expected = isinstance(error, MegalithError)
    code = error.exit_code if expected else 130 if isinstance(error, KeyboardInterrupt) else 1
    if path := os.environ.get(ERROR_FILE):
        _hand_over(path, error, expected, code)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if expected:
        print(f"error: {error}", file=sys.stderr)
    else:
        print(_trace(error), end="", file=sys.stderr)
    return code


def report_uncaught() -> None:
    """From now on `report` tells of errors that nothing catches in this launched worker."""
    if ERROR_FILE in os.environ:
        sys.excepthook = lambda kind, error, trace: report(error)


def _hand_over(path: str, error: BaseException, expected: bool, code: int) -> None:
    now, collective = time.time_ns(), _is_collective(error)
    text = str(error) if expected else _trace(error)
    extra = {
        "py_callstack": text,
        "timestamp": str(now // 10**9 + collective * SECONDS_AFTER),
        "nanoseconds": now,
        "expected": expected,
        "collective": collective,
        "exit_code": code,
    }
    partial = f"{path}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        message = printable(f"{type(error).__name__}: {error}", LINES)
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)
    os.replace(partial, path)  # the launcher, which may end this process in the middle, reads all or nothing


def _trace(error: BaseException) -> str:
    """The traceback; what it quotes cannot act on the terminal."""
    return printable("".join(traceback.format_exception(error)), LINES)


def _is_collective(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    words = isinstance(error, RuntimeError) and any(word in str(error) for word in COLLECTIVE_WORDS)
    return words or not names.isdisjoint(COLLECTIVE_ERRORS)


@dataclass(frozen=True)
class Failure:
    """How a rank ended: from elastic's ProcessFailure."""

    rank: int
    ended: int  # the process's exit code; negative: ended by that signal
    said: Mapping[str, Any] | None = None  # what `report` handed over

    @property
    def exit_code(self) -> int:
        """For the launcher to end with: the rank's own, or 128 + the signal's number."""
        if self.said is not None:
            return self.said["exit_code"]
        return self.ended if self.ended > 0 else 128 - self.ended

    @property
    def order(self) -> tuple[int, int]:
        """Errors of a rank's own before deaths by a signal, before lost connections; each by time."""
        if self.said is not None:
            return (2 if self.said["collective"] else 0), self.said["nanoseconds"]
        return (3 if -self.ended in (signal.SIGTERM, signal.SIGINT) else 1), 0

    def tell(self, world_size: int = 1) -> str:
        """What the launcher prints; with a `world_size` above 1 also of the others."""
        others = f"; the other {world_size - 1} were stopped" if world_size > 1 else ""
        if self.said is None and self.ended < 0:
            name = signal.Signals(-self.ended).name
            memory = ", which the kernel sends when host memory runs out" if name == "SIGKILL" else ""
            return f"error: rank {self.rank} was ended by {name}{memory}{others}"
        if self.said is None:
            return f"error: rank {self.rank} ended with exit code {self.ended}{others}"
        if self.said["expected"]:
            return f"error: rank {self.rank}: {self.said['py_callstack']}"
        what = "failed"
        if self.said["collective"]:
            what = "lost the others (of several machines, the one where it began tells why)"
        return f"error: rank {self.rank} {what}{others}\n{self.said['py_callstack'].rstrip()}"


def first_failure(failures: Mapping[int, Any]) -> Failure:
    """The rank whose failure made the others fail, of elastic's failures by rank."""
    found = []
    for rank, failure in failures.items():
        message = failure.message
        extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
        found.append(Failure(rank, failure.exitcode, extra if "nanoseconds" in extra else None))
    return min(found, key=lambda failure: failure.order)
