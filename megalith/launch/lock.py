"""The lock on an output folder, and the check that it does not contain another run.

The kernel holds the lock (`flock` on `OUTPUT/.lock`). It is released however the process dies, and a leftover file
locks nothing. The file's content only names the holder in error messages.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import warnings
import weakref
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import TracebackType

from megalith.errors import ConfigError
from megalith.io import make_folder, open_file
from megalith.remote import StorePath, is_inside, is_url, open_location

LOCK_NAME = ".lock"


class OutputLock:
    """Context manager that locks `output_dir` exclusively. It creates the folder if needed.

    Held until `release` or the end of the process. Folders created for the lock are removed on release if nothing
    else was written into them.

    Raises:
        ConfigError: another process holds the lock (the message names it), or the folder cannot be written.
    """

    def __init__(self, output_dir: str | Path):
        if is_url(output_dir):
            raise ConfigError(
                f"train.output_dir is {output_dir}, but a run's log and lock need a local folder; set "
                "train.output_dir to a local folder, and checkpoint.save to the URL"
            )
        folder = Path(output_dir)
        self.path = folder / LOCK_NAME
        self._created = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
        self._descriptor: int | None = None
        while self._descriptor is None:  # retry if the previous holder has just removed its empty folder
            self._descriptor = self._acquire()
        _close_in_forked_children(self)
        _write_holder(self._descriptor)

    def _acquire(self) -> int | None:
        with config_errors(self.path.parent):
            make_folder(self.path.parent)
            descriptor = open_file(self.path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read_holder(descriptor)
            os.close(descriptor)
            raise ConfigError(
                f"the output folder {self.path.parent} is in use by {holder}, and two jobs cannot write one folder; "
                "wait for that job to end, or choose another folder (train.output_dir)"
            ) from None
        except OSError as error:  # some cluster filesystems are mounted without locks
            warnings.warn(
                f"the filesystem of {self.path.parent} has no file locks ({error.strerror}), so nothing prevents a "
                "second job in this folder; start only one",
                stacklevel=3,
            )
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)
        return None

    def release(self) -> None:
        """Release the lock. Further calls do nothing."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            self._remove_created_folders()
            os.close(self._descriptor)
            self._descriptor = None

    def _remove_created_folders(self) -> None:
        folder = self.path.parent
        with contextlib.suppress(OSError):  # a folder that is not empty stays
            if self._created and os.listdir(folder) == [LOCK_NAME]:
                self.path.unlink()
                for path in self._created:
                    path.rmdir()

    def close_in_child(self) -> None:
        """Close a forked child's copy of the descriptor, without releasing the parent's lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> OutputLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _close_in_forked_children(lock: OutputLock) -> None:
    """Close the descriptor in forked children. Otherwise a data worker that outlives a killed trainer would keep the
    lock.

    The hook holds only a weak reference, so that a released lock can be collected.
    """
    reference = weakref.ref(lock)

    def close_in_child() -> None:
        parent_lock = reference()
        if parent_lock is not None:
            parent_lock.close_in_child()

    os.register_at_fork(after_in_child=close_in_child)


def lock_output(output: Path | StorePath) -> contextlib.AbstractContextManager:
    """Return the lock of a folder.

    For an object store, return a null context, which does not detect concurrent jobs.
    """
    return contextlib.nullcontext() if isinstance(output, StorePath) else OutputLock(output)


@contextlib.contextmanager
def config_errors(folder: Path | StorePath) -> Iterator[None]:
    """Turn an OSError while a run writes its first files into a ConfigError."""
    try:
        yield
    except OSError as error:
        if isinstance(folder, StorePath):
            raise ConfigError(
                f"{folder} cannot be reached: {error.strerror or error}; check the URL, its credentials and "
                "the network"
            ) from None
        file = f" ({error.filename})" if error.filename not in (None, str(folder)) else ""
        raise ConfigError(
            f"the output folder {folder} cannot be written: {error.strerror}{file}; "
            "choose a writable folder with free space (train.output_dir)"
        ) from None


def _write_holder(descriptor: int) -> None:
    holder = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    with contextlib.suppress(OSError):  # a full disk must not prevent training
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode() + b"\n", 0)


def _read_holder(descriptor: int) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):  # not yet written, or another program's file
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}, started {holder['started']}"
    return "another process"


def check_output_dir(
    output_dir: str | Path,
    load: str | Path | StorePath | None,
    save: str | None = None,
    init_from: str | None = None,
) -> None:
    """Raise ConfigError if the output folder, or `save`, contains another run: metrics or checkpoints.

    A run may continue in a folder that `load` points to or into.

    Args:
        output_dir: the setting train.output_dir.
        load: the setting checkpoint.load.
        save: object store of the run's checkpoints, or None.
        init_from: the setting model.init_from, for the message.
    """
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"train.output_dir is {folder}, which is a file; set it to a folder")
    folders = [folder] + ([] if save is None else [open_location(save)])
    if load is not None and any(is_inside(open_location(load), target) for target in folders):
        return
    for target in folders:
        if contents := _find_run(target):
            source = f"checkpoint.load is {load}" if load is not None else "checkpoint.load is not set"
            if load is None and init_from is not None:
                source = f"model.init_from {init_from} starts a new run at step 0"
            setting = "train.output_dir" if target is folder else "checkpoint.save"
            raise ConfigError(
                f"the output folder {target} holds another run ({contents}), and {source}; to resume that run set "
                f"checkpoint.load to {target}, to start a new one set {setting} to another folder"
            )


def _find_run(folder: Path | StorePath) -> str:
    """Return a description of the run in `folder`, or an empty string if there is none."""
    contents = []
    metrics = folder / "metrics.jsonl"
    if isinstance(folder, Path) and metrics.is_file() and metrics.stat().st_size > 0:
        contents.append("metrics.jsonl")
    with config_errors(folder):
        checkpoints = folder / "checkpoints"
        step_folders = [
            step
            for step in (checkpoints.iterdir() if checkpoints.is_dir() else ())
            if step.name[:5] == "step_"
        ]
        if isinstance(folder, StorePath):  # a killed save leaves an incomplete step
            step_folders = [step for step in step_folders if (step / "manifest.json").exists()]
        steps = sorted(step.name for step in step_folders)
    if steps:
        contents.append(f"{len(steps)} checkpoint{'s' if len(steps) > 1 else ''}, the last {steps[-1]}")
    return "; ".join(contents)
