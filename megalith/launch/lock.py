"""One job at a time in an output folder, and never over another run's results.

The lock is the kernel's (`flock` on `OUTPUT/.lock`): however the holder dies, it is free again at once, and a
file left behind locks nothing. What the file says of the holder is for the message only. A run that was refused
before it wrote anything leaves no folder behind.
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
    """Holds `output_dir`, which is made when absent, until `release` or the end of the process.

    A ConfigError names the holder when another process has the folder. Also a context manager.
    """

    def __init__(self, output_dir: str | Path):
        if is_url(output_dir):
            raise ConfigError(
                f"train.output_dir is {output_dir}, but a run's log and lock stand in a folder of its machine: name "
                "one, and set checkpoint.save to the URL"
            )
        folder = Path(output_dir)
        self.path = folder / LOCK_NAME
        self._made = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
        self._descriptor: int | None = None
        while self._descriptor is None:  # again where the holder before has just removed its empty folder
            self._descriptor = self._acquire()
        _close_in_forked_children(self)
        _write_holder(self._descriptor)

    def _acquire(self) -> int | None:
        with refused(self.path.parent):
            make_folder(self.path.parent)
            descriptor = open_file(self.path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read_holder(descriptor)
            os.close(descriptor)
            raise ConfigError(
                f"the output folder {self.path.parent} is in use by {holder}; two jobs cannot write one folder: "
                "wait for that one to end, or choose another folder (train.output_dir)"
            ) from None
        except OSError as error:  # some cluster filesystems are mounted without locks
            warnings.warn(
                f"the filesystem of {self.path.parent} has no file locks ({error.strerror}): start one job only "
                "in this folder, nothing guards it",
                stacklevel=3,
            )
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)
        return None

    def release(self) -> None:
        """Frees the folder; a second call does nothing. A folder made for the lock that got nothing else goes."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            self._remove_what_was_made()
            os.close(self._descriptor)
            self._descriptor = None

    def _remove_what_was_made(self) -> None:
        folder = self.path.parent
        with contextlib.suppress(OSError):  # what is not empty stays
            if self._made and os.listdir(folder) == [LOCK_NAME]:
                self.path.unlink()
                for path in self._made:
                    path.rmdir()

    def forget(self) -> None:
        """In a forked child: closes its copy of the descriptor, which leaves the parent's lock as it is."""
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
    """An flock lives until every copy of its descriptor is closed: a data worker that outlives a killed trainer
    would hold the folder. The hook holds no reference, so that a released lock can be collected."""
    reference = weakref.ref(lock)

    def forget() -> None:
        held = reference()
        if held is not None:
            held.forget()

    os.register_at_fork(after_in_child=forget)


def lock_output(output: Path | StorePath) -> contextlib.AbstractContextManager:
    """The lock of a folder. An object store has none: there nothing guards two jobs from each other."""
    return contextlib.nullcontext() if isinstance(output, StorePath) else OutputLock(output)


@contextlib.contextmanager
def refused(folder: Path | StorePath) -> Iterator[None]:
    """Makes a ConfigError of what the file system says against a run's first files in its output folder."""
    try:
        yield
    except OSError as error:
        if isinstance(folder, StorePath):
            raise ConfigError(
                f"{folder} cannot be reached: {error.strerror or error}; look at the bucket, its credentials and the "
                "network (checkpoint.save)"
            ) from None
        where = f" ({error.filename})" if error.filename not in (None, str(folder)) else ""
        raise ConfigError(
            f"the output folder {folder} cannot be written: {error.strerror}{where}; "
            "choose a folder of yours with room on its disk (train.output_dir)"
        ) from None


def _write_holder(descriptor: int) -> None:
    holder = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    with contextlib.suppress(OSError):  # a disk without room for a message is one to train on all the same
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode() + b"\n", 0)


def _read_holder(descriptor: int) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):  # not yet written, or not ours
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}, started {holder['started']}"
    return "another process"


def check_output_dir(
    output_dir: str | Path,
    load: str | Path | StorePath | None,
    save: str | None = None,
    init_from: str | None = None,
) -> None:
    """Refuses, with a ConfigError, an output folder that holds another run. Changes nothing.

    A folder holds a run when it has metrics or checkpoints. It is this run's own when `load` (the setting
    `checkpoint.load`) names the folder, its `checkpoints`, or a step in there. The same of `save`, where the run's
    steps go into an object store; a `load` of there makes both its own. `init_from`: what the run begins from, for the
    sentence.
    """
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"train.output_dir is {folder}, which is a file; name a folder")
    folders = [folder] + ([] if save is None else [open_location(save)])
    if load is not None and any(is_inside(open_location(load), own) for own in folders):
        return
    for own in folders:
        if found := _traces_of_a_run(own):
            loads = f"checkpoint.load is {load}" if load is not None else "checkpoint.load is not set"
            if load is None and init_from is not None:
                loads = f"model.init_from {init_from} begins a new run at step 0"
            setting = "train.output_dir" if own is folder else "checkpoint.save"
            raise ConfigError(
                f"the output folder {own} holds another run ({found}), and {loads}; to go on with that run set "
                f"checkpoint.load to {own}, to start a new one set {setting} to another folder"
            )


def _traces_of_a_run(folder: Path | StorePath) -> str:
    """What of an earlier run stands in `folder`, in words; empty when nothing does."""
    found = []
    metrics = folder / "metrics.jsonl"
    if isinstance(folder, Path) and metrics.is_file() and metrics.stat().st_size > 0:
        found.append("metrics.jsonl")
    with refused(folder):
        checkpoints = folder / "checkpoints"
        there = [
            step
            for step in (checkpoints.iterdir() if checkpoints.is_dir() else ())
            if step.name[:5] == "step_"
        ]
        if isinstance(folder, StorePath):  # where a killed save leaves a beginning
            there = [step for step in there if (step / "manifest.json").exists()]
        steps = sorted(step.name for step in there)
    if steps:
        found.append(f"{len(steps)} checkpoint{'s' if len(steps) > 1 else ''}, the last {steps[-1]}")
    return "; ".join(found)
