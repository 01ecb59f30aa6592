"""A folder that is made beside its place and takes its name whole, without a moment in which neither has it.

`OUT.partial` carries a mark that its maker holds a lock on. What is found there without the mark is someone's own and
is not touched; what has it and is not locked was left by a conversion that was killed. Where an old folder in the place
takes two renames (`io.replace_folder`), a kill between them is mended by the next conversion to this place.
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
from megalith.remote import StorePath

MARK = ".megalith_conversion"
READ_FIRST = ("config.json", "adapter_config.json", "latest_checkpointed_iteration.txt")


class PartialFolder:
    """`OUT.partial`, from `begin` to `commit` or `abandon`. All raise OSError, and CheckpointError as they say."""

    def __init__(self, out: Path):
        self.out = out
        self.path = out.with_name(out.name + ".partial")
        self._aside = out.with_name(out.name + ".replaced")
        self._lock: int | None = None

    def begin(self) -> None:
        """Makes the folder. Raises CheckpointError where another process does, or something else has its name."""
        make_folder(self.out.parent)
        if self.out.is_symlink():
            raise CheckpointError(f"{self.out} is a symbolic link; name the folder that it leads to")
        self._clear_remains()
        try:
            self.path.mkdir()
        except FileExistsError:
            raise CheckpointError(
                f"{self.path} is being made by another process; wait for it to end"
            ) from None
        self._hold(self.path / MARK, os.O_CREAT | os.O_EXCL)

    def commit(self) -> None:
        """Gives the folder, whose files are on the disk, its name; what had it before is removed."""
        try:
            old = replace_folder(self.path, self.out, self._aside)
        except FileExistsError as error:
            raise CheckpointError(f"{error.filename} {error.strerror}; move it") from None
        if old is not None:
            os.rename(self.out / MARK, old / MARK)  # what is left of it, should we be killed now, is known
            _remove_marked(old)
        (self.out / MARK).unlink(missing_ok=True)
        self._release()

    def abandon(self) -> None:
        """Removes what was made, where it was this process that made it."""
        if self._lock is not None:
            _remove_marked(self.path)
            self._release()

    def _clear_remains(self) -> None:
        """Removes what a killed conversion to this place left, and gives an old folder that it set aside its name."""
        marked = [folder for folder in (self.path, self.out, self._aside) if (folder / MARK).is_file()]
        for folder in (self.path, self._aside):
            with contextlib.suppress(OSError):
                folder.rmdir()  # an empty one is nobody's loss: a kill came before it had its mark, or after
        if not marked:
            if os.path.lexists(self.path):
                raise CheckpointError(
                    f"{self.path} is there, and is not what a conversion left; move it away, or choose another path"
                )
            return
        self._hold(marked[0] / MARK)
        if self._aside.is_dir() and not self.out.exists():
            os.rename(self._aside, self.out)
        elif self.out in marked or self._aside in marked:  # it was whole, and the rest is what it replaced
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
                f"{self.path} is being made by another process; wait for it to end"
            ) from None
        except OSError:  # a filesystem without locks: nothing guards it
            pass

    def _release(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):
                os.close(self._lock)
            self._lock = None


class SentFolder:
    """The same in an object store: made in a temporary folder and sent, last the file without which none is read."""

    def __init__(self, out: StorePath):
        self.out = out
        self._made = tempfile.TemporaryDirectory()
        self.path = Path(self._made.name)

    def begin(self) -> None: ...

    def commit(self) -> None:
        for name in READ_FIRST:
            (self.out / name).unlink(missing_ok=True)
        self.out.remove()
        files = (file for file in self.path.rglob("*") if file.is_file())
        for file in sorted(files, key=lambda file: file.name in READ_FIRST):
            (self.out / file.relative_to(self.path).as_posix()).send(file)
        self.abandon()

    def abandon(self) -> None:
        self._made.cleanup()


def partial_folder(out: Path | StorePath) -> PartialFolder | SentFolder:
    """What makes a folder at `out` whole."""
    return SentFolder(out) if isinstance(out, StorePath) else PartialFolder(out)


@contextlib.contextmanager
def new_folder(out: Path | StorePath) -> Iterator[Path]:
    """A folder to fill that becomes `out` on a clean exit, its files and folders synced; on an error nothing is left.

    Raises CheckpointError where something is at `out`, or it cannot be written.
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
        raise CheckpointError(
            f"{out} could not be written: {error.strerror or error}; nothing of it is left: make room, or choose "
            "another place"
        ) from error
    finally:
        folder.abandon()


def _remove_marked(folder: Path) -> None:
    """Removes a folder, its mark last: what is left after a kill is still known. Raises nothing."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != MARK:
                path.unlink(missing_ok=True)
        (folder / MARK).unlink(missing_ok=True)
        folder.rmdir()
