"""Atomic creation or replacement of a folder: written as `OUT.partial`, then renamed.

`OUT.partial` contains a mark file that its writer locks. A folder without the mark belongs to the user and is not
touched. A mark without a lock was left by a killed conversion, and the folder is removed. Where replacing a folder
takes two renames (`io.replace_folder`), a kill between them is repaired by the next conversion to this path.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megalith.bridge.folder import path_exists
from megalith.errors import CheckpointError
from megalith.io import make_folder, replace_folder, sync_folder, sync_path
from megalith.remote import StorePath, remove_all
from megalith.temporary_folders import TemporaryFolder

MARK = ".megalith_conversion"
SENT_LAST = ("config.json", "adapter_config.json", "latest_checkpointed_iteration.txt")


class PartialFolder:
    """A local folder written as `OUT.partial`, from `begin` to `commit` or `abandon`. All methods may raise OSError."""

    def __init__(self, out: Path):
        self.out = out
        self.path = out.with_name(out.name + ".partial")
        self._aside = out.with_name(out.name + ".replaced")
        self._lock: int | None = None

    def begin(self) -> None:
        """Create the folder. Raises CheckpointError if another process is writing it or the user owns it."""
        make_folder(self.out.parent)
        if self.out.is_symlink():
            raise CheckpointError(f"{self.out} is a symbolic link; pass the folder that it points to")
        self._clear_remains()
        try:
            self.path.mkdir()
        except FileExistsError:
            raise CheckpointError(
                f"{self.path} is being written by another process; wait for it to end"
            ) from None
        self._hold(self.path / MARK, os.O_CREAT | os.O_EXCL)

    def commit(self) -> None:
        """Rename the synced folder to its final name and remove the old one."""
        try:
            old = replace_folder(self.path, self.out, self._aside)
        except FileExistsError as error:
            raise CheckpointError(f"{error.filename} already exists; move it away") from None
        if old is not None:
            os.rename(self.out / MARK, old / MARK)  # so that its remains are recognized if we are killed now
            _remove_marked(old)
        (self.out / MARK).unlink(missing_ok=True)
        self._release()

    def abandon(self) -> None:
        """Remove the folder if this process created it."""
        if self._lock is not None:
            _remove_marked(self.path)
            self._release()

    def _clear_remains(self) -> None:
        """Remove the remains of a killed conversion to this path, and restore an old folder that it moved aside."""
        marked = [folder for folder in (self.path, self.out, self._aside) if (folder / MARK).is_file()]
        for folder in (self.path, self._aside):
            with contextlib.suppress(OSError):
                folder.rmdir()  # empty: killed before the mark was written or after it was removed
        if not marked:
            if os.path.lexists(self.path):
                raise CheckpointError(
                    f"{self.path} exists but was not created by a conversion; move it, or choose another path"
                )
            return
        self._hold(marked[0] / MARK)
        if self._aside.is_dir() and not self.out.exists():
            os.rename(self._aside, self.out)
        elif self.out in marked or self._aside in marked:  # the new folder is complete
            _remove_marked(self._aside)
        _remove_marked(self.path)
        (self.out / MARK).unlink(missing_ok=True)
        self._release()

    def _hold(self, mark: Path, flags: int = 0) -> None:
        self._lock = os.open(mark, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._release()
            raise CheckpointError(
                f"{self.path} is being written by another process; wait for it to end"
            ) from None
        except OSError:  # the file system has no locks
            pass

    def _release(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):
                os.close(self._lock)
            self._lock = None


class SentFolder:
    """A folder in an object store: written locally and uploaded. The file that makes it readable is uploaded last."""

    def __init__(self, out: StorePath):
        self.out = out
        self._made = TemporaryFolder("megalith_export_")
        self.path = self._made.path / "folder"

    def begin(self) -> None:
        self.path.mkdir()

    def commit(self) -> None:
        for name in SENT_LAST:
            (self.out / name).unlink(missing_ok=True)
        self.out.remove()
        files = (file for file in self.path.rglob("*") if file.is_file())
        try:
            for file in sorted(files, key=lambda file: file.name in SENT_LAST):
                (self.out / file.relative_to(self.path).as_posix()).send(file)
        except BaseException:
            remove_all(self.out)
            raise
        self.abandon()

    def abandon(self) -> None:
        self._made.remove()


def partial_folder(out: Path | StorePath) -> PartialFolder | SentFolder:
    """Return the writer for a local folder or one in an object store."""
    return SentFolder(out) if isinstance(out, StorePath) else PartialFolder(out)


@contextlib.contextmanager
def new_folder(out: Path | StorePath) -> Iterator[Path]:
    """Yield a folder that becomes `out` at the end, synced. On an error nothing is left.

    Raises CheckpointError if `out` exists or cannot be written.
    """
    if path_exists(out):
        raise CheckpointError(f"{out} already exists; remove it, or choose another path")
    folder = partial_folder(out)
    try:
        folder.begin()
        yield folder.path
        for path in folder.path.rglob("*"):
            sync_folder(path) if path.is_dir() else sync_path(path)
        sync_folder(folder.path)
        folder.commit()
    except OSError as error:
        raise write_error(out, error) from error
    finally:
        folder.abandon()


def write_error(out: Path | StorePath, error: OSError) -> CheckpointError:
    """Return the error for a folder that could not be written."""
    way_out = "free disk space, or choose another path"
    if isinstance(out, StorePath):
        way_out = f"check the bucket, its credentials and the network, or free disk space in {tempfile.gettempdir()}"
    return CheckpointError(
        f"{out} could not be written: {error.strerror or error}; the partial output was removed: {way_out}"
    )


def _remove_marked(folder: Path) -> None:
    """Remove a folder, its mark last, so that its remains are recognized after a kill. Raises nothing."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != MARK:
                path.unlink(missing_ok=True)
        (folder / MARK).unlink(missing_ok=True)
        folder.rmdir()
