"""Errors of ranks, and the search for the rank that failed first.

If one rank fails, the others fail after it in their collectives, with uninformative errors. A worker started by a
launcher therefore does not print its error. It writes the error to the launcher's error file (torch elastic's, so
torchrun shows it too) and exits at once, and the launcher prints the failure that came first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megalith.errors import LINES, MegalithError, TrainingError, printable

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
CRASH_FILE = "MEGALITH_CRASH_FILE"  # exists once a rank has crashed
STACKS = ".stacks"  # suffix of the error file's name: the stacks of a rank's threads
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
REPORTED_COLLECTIVES = 3
COLLECTIVE_ERRORS = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "RankLost")
COLLECTIVE_WORDS = ("gloo/", "Connection closed by peer", "NCCL error", "ProcessGroup")

# torchrun takes the failure with the earliest second as the cause, which a lost connection never is.
SECONDS_AFTER = 5


class RankLost(TrainingError):
    """Raised if another rank has died or cannot be reached."""


def report(error: BaseException) -> int:
    """Print an error that ends this process to stderr, and return the exit code.

    A MegalithError is printed as its message, other errors with their traceback. A launched worker writes the error
    file instead and exits at once, because interpreter shutdown could wait for collectives that the other ranks will
    never join.
    """
    expected = isinstance(error, MegalithError)
    code = error.exit_code if expected else 130 if isinstance(error, KeyboardInterrupt) else 1
    if path := os.environ.get(ERROR_FILE):
        _write_error_file(path, error, expected, code)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if expected:
        print(f"error: {error}", file=sys.stderr)
    else:
        print(_trace(error), end="", file=sys.stderr)
    return code


def report_uncaught() -> None:
    """Report uncaught errors of a launched worker with `report`, and enable faulthandler for crashes.

    The thread stacks of a crash go into the launcher's folder, or to stderr without a Megalith launcher.
    """
    path = os.environ.get(ERROR_FILE)
    if path is not None:
        sys.excepthook = lambda kind, error, trace: report(error)
    if faulthandler.is_enabled():
        return
    if path is not None and CRASH_FILE in os.environ:
        faulthandler.enable(open(path + STACKS, "w"))  # noqa: SIM115 (to the end of the process)
    else:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is not a file
            faulthandler.enable()


def is_failing() -> bool:
    """Return True if this process is exiting because of an uncaught exception. For use in exit handlers."""
    return getattr(sys, "last_value", None) is not None


def _write_error_file(path: str, error: BaseException, expected: bool, code: int) -> None:
    now, collective = time.time_ns(), is_collective_error(error)
    text = str(error) if expected else _trace(error)
    extra = {
        "py_callstack": text,
        "timestamp": str(now // 10**9 + collective * SECONDS_AFTER),
        "nanoseconds": now,
        "expected": expected,
        "collective": collective,
        "exit_code": code,
        "collectives": _collectives(),
    }
    partial = f"{path}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        message = printable(f"{type(error).__name__}: {error}", LINES)
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)
    os.replace(partial, path)  # atomic: the launcher may kill this process while it writes


def _collectives() -> str:
    """Return this rank's most recent collectives, which the launcher prints if another rank was killed."""
    if "torch.distributed" not in sys.modules:
        return ""
    from megalith.launch.last_collectives import last_collectives

    try:
        return last_collectives(REPORTED_COLLECTIVES)
    except Exception:  # no flight recorder, or a broken one, must not hide the error itself
        return ""


def _trace(error: BaseException) -> str:
    """Return the traceback, with control characters escaped."""
    return printable("".join(traceback.format_exception(error)), LINES)


def is_collective_error(error: BaseException) -> bool:
    """Return True if the error comes from a collective whose other ranks failed first."""
    names = {kind.__name__ for kind in type(error).__mro__}
    words = isinstance(error, RuntimeError) and any(word in str(error) for word in COLLECTIVE_WORDS)
    return words or not names.isdisjoint(COLLECTIVE_ERRORS)


@dataclass(frozen=True)
class Failure:
    """Failure of one rank, from torch elastic's ProcessFailure."""

    rank: int
    exit_status: int  # the process's exit code; negative: number of the signal that ended it
    error: Mapping[str, Any] | None = None  # written by `report`
    stacks: str = ""  # of the rank's threads, after a crash
    not_connected: str = ""  # why the launcher stopped the rank before it was connected
    others: str = ""  # last collectives of the other ranks

    @property
    def exit_code(self) -> int:
        """Exit code of the launcher: the rank's exit code, 128 + the signal number, or 1 if a machine was lost."""
        if self.not_connected:
            return 1
        if self.error is not None:
            return self.error["exit_code"]
        return self.exit_status if self.exit_status > 0 else 128 - self.exit_status

    @property
    def order(self) -> tuple[int, int]:
        """Sort key that puts the likely cause first: errors raised by the rank, then crashes and kills, then lost
        connections, then ranks that SIGTERM or SIGINT ended. Within a kind, failures with an error file are sorted by
        time.
        """
        if self.error is not None:
            return (2 if self.error["collective"] else 0), self.error["nanoseconds"]
        return (3 if -self.exit_status in (signal.SIGTERM, signal.SIGINT) else 1), 0

    def message(self, world_size: int = 1) -> str:
        """Return the launcher's message. It lists the other ranks if `world_size` is above 1."""
        if self.not_connected:
            return f"error: the ranks of this machine were stopped before they were connected: {self.not_connected}"
        others = ""
        if world_size > 1:
            other = f"other {world_size - 1} ranks were" if world_size > 2 else "other rank was"
            others = f"; the {other} stopped"
        if self.error is None and self.exit_status < 0:
            name = signal.Signals(-self.exit_status).name
            memory = ", which the kernel sends when host memory runs out" if name == "SIGKILL" else ""
            details = "".join(f"\n{text}" for text in (self.stacks.rstrip(), self.others) if text)
            return f"error: rank {self.rank} was ended by {name}{memory}{others}{details}"
        if self.error is None:
            return f"error: rank {self.rank} ended with exit code {self.exit_status}{others}"
        if self.error["expected"]:
            return f"error: rank {self.rank}: {self.error['py_callstack']}"
        event = "failed"
        if self.error["collective"]:
            event = "lost the other ranks (on several machines, the one that failed first prints the cause)"
        return f"error: rank {self.rank} {event}{others}\n{self.error['py_callstack'].rstrip()}"


def stopped_rank(rank: int, reason: str, exit_code: int) -> Failure:
    """Return the Failure of a rank whose process the launcher has ended. `reason` is a main clause."""
    error = {
        "exit_code": exit_code,
        "expected": True,
        "collective": False,
        "nanoseconds": time.time_ns(),
        "py_callstack": f"{reason}, so its process was stopped",
    }
    return Failure(rank, exit_code, error)


def first_failure(failures: Mapping[int, Any], error_files: Mapping[int, str] | None = None) -> Failure:
    """Return the failure that caused the others.

    Args:
        failures: torch elastic's ProcessFailure by rank.
        error_files: path of the error file by rank.
    """
    candidates = []
    for rank, failure in failures.items():
        message = failure.message
        extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
        error = extra if "nanoseconds" in extra else None
        candidates.append(Failure(rank, failure.exitcode, error, _stacks((error_files or {}).get(rank, ""))))
    first = min(candidates, key=lambda failure: failure.order)
    last = {failure.rank: failure.error.get("collectives") for failure in candidates if failure.error}
    collectives = "; ".join(f"rank {rank}: {names}" for rank, names in sorted(last.items()) if names)
    return replace(first, others=f"last collectives of the others: {collectives}" if collectives else "")


def _stacks(error_file: str) -> str:
    try:
        return Path(error_file + STACKS).read_text("utf-8", errors="replace")
    except OSError:
        return ""
