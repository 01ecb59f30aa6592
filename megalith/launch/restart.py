"""Starting again after a failure: a pause that grows, the run's own newest checkpoint, and the first error kept.

An elastic launcher (`--max-restarts`, torchrun) runs the same command again, for the launcher knows nothing of what it
runs. So a process finds out for itself that it is not the first: rank 0 of the first attempt leaves the launcher's mark
in the output folder, and a later one that finds its own launcher's goes on from the newest checkpoint there, whatever
`checkpoint.load` says of the start. Another job's mark is no mark: that folder is refused as ever.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megalith.config import RunConfig
from megalith.errors import MegalithError
from megalith.io import make_subfolder, open_file, replace_file
from megalith.launch.lock import OutputLock, check_output_dir, refused
from megalith.launch.parent import boot_id, process_start_time
from megalith.launch.rendezvous import JOB
from megalith.remote import StorePath, open_location
from megalith.small_files import read_small_file

MARK = ".job"
FAILURES = "failures"
LONGEST_PAUSE = 60.0  # seconds


@dataclass(frozen=True)
class Attempt:
    """Which start of which job this process belongs to."""

    number: int = 0
    """Restarts so far; a change of machines without a failure is none."""
    launcher: str | None = None
    """Names the elastic launcher that started rank 0; None without one."""


def this_attempt() -> Attempt:
    """As the elastic launcher's environment says it."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return Attempt()
    launcher = os.environ.get(JOB) or _named(run_id, os.getppid())
    return Attempt(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), launcher)


def _named(run_id: str, launcher: int) -> str:
    """A name that no other launcher has: run ids, host names and process ids repeat, in containers above all."""
    return f"{run_id} {socket.gethostname()} {boot_id()} {launcher} {process_start_time(launcher)}"


def pause(attempt: Attempt) -> float:
    """Seconds to wait before this attempt: 0, then 1, 2, 4, … 60, so that a fault that comes again does no harm."""
    return min(2.0 ** (attempt.number - 1), LONGEST_PAUSE) if attempt.number else 0.0


@contextmanager
def locked_output_dir(config: RunConfig, attempt: Attempt) -> Iterator[bool]:
    """The output folder, for this run alone; True where an earlier attempt of the same job has saved there.

    Rank 0 calls it. Raises ConfigError where another job has the folder, or has left a run in it.
    """
    output, saved = Path(config.train.output_dir), open_location(config.run_folder)
    with OutputLock(output):
        if _is_marked(output, attempt):
            with refused(saved):  # no clock is asked: it may have been set back
                has_saved = not _saves(saved) <= set(_mark(output)[1:])
            yield has_saved
            return
        check_output_dir(output, config.checkpoint.load, config.checkpoint.save, config.model.init_from)
        if attempt.launcher is not None:
            with refused(saved):
                before = sorted(_saves(saved))
            with refused(output):
                replace_file(output / MARK, "\n".join([attempt.launcher, *before]))
        try:
            yield False
        finally:
            if not _has_begun(output):  # refused: nothing is left behind
                (output / MARK).unlink(missing_ok=True)


def _is_marked(output: Path, attempt: Attempt) -> bool:
    """Whether an earlier attempt of the same launcher has claimed the folder."""
    try:
        return attempt.launcher is not None and _mark(output)[0] == attempt.launcher
    except (OSError, UnicodeDecodeError):
        return False


def _mark(output: Path) -> list[str]:
    """The launcher, and the checkpoints that were there before its first attempt."""
    return read_small_file(output / MARK, output).decode().split("\n")


def _saves(folder: Path | StorePath) -> set[str]:
    if isinstance(folder, StorePath):
        manifests = [step / "manifest.json" for step in (folder / "checkpoints").iterdir()]
        return {f"{file.parent.name} {file.version()}" for file in manifests if file.exists()}
    found = (folder / "checkpoints").glob("step_*/manifest.json")
    return {f"{manifest.parent.name} {manifest.stat().st_mtime_ns}" for manifest in found}


def _has_begun(output: Path) -> bool:
    return (output / "config.yaml").exists()


@contextmanager
def record_failures(output: Path, attempt: Attempt, rank: int) -> Iterator[None]:
    """Writes down what ends a run that has begun. The first attempt's file tells what a crash loop came from."""
    try:
        yield
    except Exception as error:
        if _has_begun(output):
            with suppress(OSError):  # the error is printed elsewhere too
                _write_down(error, output / FAILURES / f"attempt_{attempt.number:03d}_rank_{rank:05d}.txt")
        raise


def _write_down(error: Exception, path: Path) -> None:
    text = str(error) if isinstance(error, MegalithError) else "".join(traceback.format_exception(error))
    make_subfolder(path.parent)
    line = f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text.rstrip()}\n"
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
        file.write(line.encode(errors="replace"))
