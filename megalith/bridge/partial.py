"""A folder that is made beside its place and takes its name whole, without a moment in which neither has it.

`OUT.partial` carries a mark that its maker holds a lock on. What is found there without the mark is someone's own and
is not touched; what has it and is not locked was left by a conversion that was killed. An old folder in the place
changes names with the new one in a single call of the kernel. Filesystems that have no such call (NFS, Lustre) take
two renames; a kill between them is mended by the next conversion to this place.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from pathlib import Path

from megalith.errors import CheckpointError
from megalith.io import make_folder, sync_folder

MARK = ".megalith_conversion"
AT_FDCWD, RENAME_EXCHANGE = -100, 2
NOT_KNOWN = (errno.ENOSYS, errno.EINVAL, errno.EXDEV, errno.EOPNOTSUPP)


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
        old: Path | None = None
        if self.out.exists():
            old = self.path if _exchange(self.path, self.out) else self._rename_twice()
        else:
            os.rename(self.path, self.out)
        sync_folder(self.out.parent)
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

    def _rename_twice(self) -> Path:
        if os.path.lexists(self._aside):
            raise CheckpointError(
                f"{self._aside} is there already, where the old {self.out.name} was to go; move it"
            )
        os.rename(self.out, self._aside)
        os.rename(self.path, self.out)
        return self._aside

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


def _exchange(one: Path, other: Path) -> bool:
    """Two paths change names at once; False where the system cannot. Raises OSError."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in NOT_KNOWN:
        return False
    raise OSError(number, os.strerror(number), str(other))
