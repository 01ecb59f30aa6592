"""Restarts after a failure, with increasing pauses, from the newest checkpoint. Every error is recorded.

An elastic launcher (`--max-restarts`, torchrun) runs the same command again. To recognize a restart, rank 0 of the
first attempt writes the launcher's name into the output folder. A later attempt of the same launcher resumes from the
newest checkpoint there, whatever `checkpoint.load` is. If the file names another launcher, it is ignored, and a
folder that contains another run is rejected as usual.
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
from megalith.errors import MegalithError, TrainingError
from megalith.io import make_subfolder, open_file, replace_file
from megalith.launch.lock import OutputLock, check_output_dir, config_errors
from megalith.launch.parent import JOB, boot_id, process_start_time
from megalith.remote import StorePath, open_location
from megalith.small_files import RefusedFile, read_small_file

JOB_FILE = ".job"
FAILURES = "failures"
MAX_PAUSE = 60.0  # seconds


@dataclass(frozen=True)
class Attempt:
    """One start of a job."""

    number: int = 0
    """Restarts after failures so far; a change of machines is not counted."""
    launcher: str | None = None
    """Unique name of the elastic launcher that started rank 0; None without an elastic launcher."""


def this_attempt() -> Attempt:
    """Return this process's attempt, from the elastic launcher's environment variables."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return Attempt()
    launcher = os.environ.get(JOB) or _launcher_name(run_id, os.getppid())
    return Attempt(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), launcher)


def _launcher_name(run_id: str, launcher: int) -> str:
    """Return a unique launcher name. Run ids, hostnames and process ids alone can repeat, especially in containers."""
    return f"{run_id} {socket.gethostname()} {boot_id()} {launcher} {process_start_time(launcher)}"


def pause(attempt: Attempt) -> float:
    """Return the pause before this attempt in seconds: 0, then 1, 2, 4, … 60."""
    return min(2.0 ** (attempt.number - 1), MAX_PAUSE) if attempt.number else 0.0


@contextmanager
def locked_output_dir(config: RunConfig, attempt: Attempt) -> Iterator[bool]:
    """Lock the output folder within the context. Yields True if an earlier attempt of the same job has saved there.
    Rank 0 calls this.

    Raises:
        ConfigError: another job uses the folder, or has left a run in it.
        TrainingError: the folder cannot be read at present.
    """
    output, saved = Path(config.train.output_dir), open_location(config.run_folder)
    with OutputLock(output):
        if _is_same_job(output, attempt):
            yield has_saved(config)
            return
        check_output_dir(output, config.checkpoint.load, config.checkpoint.save, config.model.init_from)
        if attempt.launcher is not None:
            with config_errors(saved):
                before = sorted(_saves(saved))
            with config_errors(output):
                replace_file(output / JOB_FILE, "\n".join([attempt.launcher, *before]))
        try:
            yield False
        finally:
            if not _has_begun(output):  # the run was rejected: leave no file
                (output / JOB_FILE).unlink(missing_ok=True)


def has_saved(config: RunConfig) -> bool:
    """Return True if this job has saved a checkpoint in its output folder. Rank 0 calls this, with the folder locked.

    Raises:
        ConfigError: the folder cannot be read.
    """
    output, saved = Path(config.train.output_dir), open_location(config.run_folder)
    with config_errors(saved):  # compares names, not times: a clock may have been set back
        return not _saves(saved) <= set(_read_job_file(output)[1:])


def _is_same_job(output: Path, attempt: Attempt) -> bool:
    """Return True if an earlier attempt of the same launcher has used the folder.

    Raises TrainingError if that cannot be read now, so that the launcher tries again.
    """
    if attempt.launcher is None:
        return False
    try:
        return _read_job_file(output)[0] == attempt.launcher
    except (FileNotFoundError, RefusedFile, UnicodeDecodeError):
        return False
    except OSError as error:
        raise TrainingError(
            f"{output / JOB_FILE}, which tells whether this job has begun, cannot be read: {error.strerror}; start the "
            "job again when its storage answers"
        ) from None


def _read_job_file(output: Path) -> list[str]:
    """Return the launcher's name, and the names of the checkpoints that existed before its first attempt."""
    return read_small_file(output / JOB_FILE, output).decode().split("\n")


def _saves(folder: Path | StorePath) -> set[str]:
    if isinstance(folder, StorePath):
        manifests = [step / "manifest.json" for step in (folder / "checkpoints").iterdir()]
        return {f"{file.parent.name} {file.version()}" for file in manifests if file.exists()}
    manifests = (folder / "checkpoints").glob("step_*/manifest.json")
    return {f"{manifest.parent.name} {manifest.stat().st_mtime_ns}" for manifest in manifests}


def _has_begun(output: Path) -> bool:
    return (output / "config.yaml").exists()


@contextmanager
def record_failures(output: Path, attempt: Attempt, rank: int) -> Iterator[None]:
    """Record the error that ends a run in a file per attempt. The first one shows the cause of a crash loop."""
    try:
        yield
    except Exception as error:
        if _has_begun(output):
            with suppress(OSError):  # the error is printed as well
                _append_failure(
                    error, output / FAILURES / f"attempt_{attempt.number:03d}_rank_{rank:05d}.txt"
                )
        raise


def _append_failure(error: Exception, path: Path) -> None:
    text = str(error) if isinstance(error, MegalithError) else "".join(traceback.format_exception(error))
    make_subfolder(path.parent)
    line = f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text.rstrip()}\n"
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
        file.write(line.encode(errors="replace"))
