"""Which process of a job failed first, and its own words for it.

When one rank fails, the others fail after it in their collectives, with errors that say nothing. So a worker that was
started by a launcher does not print its error: it hands it over in the file that the launcher has named to it
(torch elastic's, so torchrun shows it too) and ends at once. The launcher shows the one that came first.
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
CRASH_FILE = "MEGALITH_CRASH_FILE"  # there from when a rank has died of an error of the program
STACKS = ".stacks"  # ends the name of the file beside the error file that has the stacks of a rank's threads
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
COLLECTIVES_TOLD = 3
COLLECTIVE_ERRORS = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "RankLost")
COLLECTIVE_WORDS = ("gloo/", "Connection closed by peer", "NCCL error", "ProcessGroup")

# Torchrun takes the failure with the lowest whole second for the cause of the others; a lost connection never is.
SECONDS_AFTER = 5


class RankLost(TrainingError):
    """Another rank has died or is not reached: what this one waits for will not come."""


def report(error: BaseException) -> int:
    """Tells of an error that ends this process, and returns its exit code.

    A MegalithError is printed as its sentence, another error with its traceback, on stderr. A launched worker tells the
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
    """From now on `report` tells of errors that nothing catches in this launched worker, and a signal that ends it
    leaves the stacks of its threads: in the launcher's folder, or on stderr where no launcher of ours reads it."""
    path = os.environ.get(ERROR_FILE)
    if path is not None:
        sys.excepthook = lambda kind, error, trace: report(error)
    if faulthandler.is_enabled():
        return
    if path is not None and CRASH_FILE in os.environ:
        faulthandler.enable(open(path + STACKS, "w"))  # noqa: SIM115 (to the end of the process)
    else:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a stderr that is no file
            faulthandler.enable()


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
        "collectives": _collectives(),
    }
    partial = f"{path}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        message = printable(f"{type(error).__name__}: {error}", LINES)
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)
    os.replace(partial, path)  # the launcher, which may end this process in the middle, reads all or nothing


def _collectives() -> str:
    """This rank's last ones, for the launcher to sentence where another has died without a word."""
    if "torch.distributed" not in sys.modules:
        return ""
    from megalith.launch.last_collectives import last_collectives

    try:
        return last_collectives(COLLECTIVES_TOLD)
    except Exception:  # torch has no recorder here, or it is broken: the error itself is to be printed
        return ""


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
    stacks: str = ""  # of its threads, where a signal ended it that is an error of the program
    lost: str = ""  # why the launcher ended it, where it was not connected yet
    others: str = ""  # the last collectives of the ranks that lost it

    @property
    def exit_code(self) -> int:
        """For the launcher to end with: the rank's own, or 128 + the signal's number; 1 where another was lost."""
        if self.lost:
            return 1
        if self.said is not None:
            return self.said["exit_code"]
        return self.ended if self.ended > 0 else 128 - self.ended

    @property
    def order(self) -> tuple[int, int]:
        """Errors of a rank's own before deaths by a signal, before lost connections; each by time."""
        if self.said is not None:
            return (2 if self.said["collective"] else 0), self.said["nanoseconds"]
        return (3 if -self.ended in (signal.SIGTERM, signal.SIGINT) else 1), 0

    def sentence(self, world_size: int = 1) -> str:
        """What the launcher prints; with a `world_size` above 1 also of the others."""
        if self.lost:
            return f"error: the ranks of this machine were stopped before they were connected: {self.lost}"
        others = f"; the other {world_size - 1} were stopped" if world_size > 1 else ""
        if self.said is None and self.ended < 0:
            name = signal.Signals(-self.ended).name
            memory = ", which the kernel sends when host memory runs out" if name == "SIGKILL" else ""
            left = "".join(f"\n{text}" for text in (self.stacks.rstrip(), self.others) if text)
            return f"error: rank {self.rank} was ended by {name}{memory}{others}{left}"
        if self.said is None:
            return f"error: rank {self.rank} ended with exit code {self.ended}{others}"
        if self.said["expected"]:
            return f"error: rank {self.rank}: {self.said['py_callstack']}"
        what = "failed"
        if self.said["collective"]:
            what = "lost the others (with several machines, the one where it began prints why)"
        return f"error: rank {self.rank} {what}{others}\n{self.said['py_callstack'].rstrip()}"


def first_failure(failures: Mapping[int, Any], error_files: Mapping[int, str] | None = None) -> Failure:
    """The rank whose failure made the others fail, of elastic's failures by rank; and the files named to the ranks."""
    found = []
    for rank, failure in failures.items():
        message = failure.message
        extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
        said = extra if "nanoseconds" in extra else None
        found.append(Failure(rank, failure.exitcode, said, _stacks((error_files or {}).get(rank, ""))))
    first = min(found, key=lambda failure: failure.order)
    last = {failure.rank: failure.said.get("collectives") for failure in found if failure.said}
    told = "; ".join(f"rank {rank}: {made}" for rank, made in sorted(last.items()) if made)
    return replace(first, others=f"last collectives of the others: {told}" if told else "")


def _stacks(error_file: str) -> str:
    try:
        return Path(error_file + STACKS).read_text("utf-8", errors="replace")
    except OSError:
        return ""
