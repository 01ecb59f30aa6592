"""Files and folders that are on the disk when we say so, and that nobody has put elsewhere.

A file is lost with its folder's entry, however well synced, so folders are synced too. A folder that is written into
may have come from someone else, with symbolic links in the place of the files that a run writes: what is written here
never goes through one. Links above the folder are the user's own. Whoever syncs a file or renames a folder calls what
stands here. Places in an object store are remote.py's.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from megalith.errors import DataError

LINK = "it is a symbolic link, which nothing is written through"
NO_FILE = "it is not a regular file"


def make_folder(folder: Path) -> None:
    """Makes a folder, and those above it, where they are absent; their entries are then on the disk. Raises OSError."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in made:
        with contextlib.suppress(
            PermissionError
        ):  # one may be allowed to write in a folder, but not to open it
            sync_folder(path.parent)


def make_subfolder(folder: Path) -> Path:
    """Makes a folder inside one that is written into, where it is absent, and returns it. Raises OSError for a link."""
    reject_symlink(folder)
    make_folder(folder)
    return folder


def sync_folder(folder: Path) -> None:
    """Puts a folder's entries (new files, renames) on the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(file: IO | int) -> None:
    """Puts what was written to an open file on the disk. Raises OSError."""
    if not isinstance(file, int):
        file.flush()
    os.fsync(file if isinstance(file, int) else file.fileno())


def write_file(path: Path, content: str | bytes) -> None:
    """Writes a file, text as UTF-8, and syncs it. Raises OSError."""
    with open(path, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        sync_file(file)


def replace_folder(new: Path, name: Path, aside: Path) -> Path | None:
    """Gives a folder, whose files are on the disk, the name of another, which it exchanges in one call of the kernel.

    Filesystems that have no such call (NFS, Lustre) take two renames, by way of `aside`. Returns where the folder is
    now that had the name; None where none had. Raises OSError.
    """
    old = None
    if not os.path.lexists(name):
        os.replace(new, name)
    elif exchange(new, name):
        old = new
    elif os.path.lexists(aside):
        raise FileExistsError(
            errno.EEXIST, f"is there already, where the old {name.name} was to go", str(aside)
        )
    else:
        os.replace(name, aside)
        os.replace(new, name)
        old = aside
    sync_folder(name.parent)
    return old


AT_FDCWD, RENAME_EXCHANGE = -100, 2
NOT_KNOWN = (errno.ENOSYS, errno.EINVAL, errno.EXDEV, errno.EOPNOTSUPP)


def exchange(one: Path, other: Path) -> bool:
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


def open_file(path: Path, flags: int) -> int:
    """The descriptor of a regular file, as os.open gives it. Raises OSError, also for a link or a pipe."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, LINK, str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, NO_FILE, str(path))
    return descriptor


def reject_symlink(path: Path) -> None:
    """Raises OSError where `path` is a symbolic link."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, LINK, str(path))


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """An empty file beside `path` that takes its name on a clean exit, and goes after an error. Raises OSError.

    A reader, and whoever comes after a crash, finds the old content or the new, whole. The name until then is random.
    """
    reject_symlink(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    os.close(open_file(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    try:
        yield partial
        sync_path(partial)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    sync_folder(path.parent)


def replace_file(path: Path, content: str | bytes) -> None:
    """Gives a file new content, text as UTF-8, at once and on the disk (see `atomic_path`). Raises OSError.

    It is this process's own: what a killed one has left beside it goes.
    """
    for left in path.parent.iterdir():
        if re.fullmatch(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.tmp", left.name):
            left.unlink(missing_ok=True)
    with atomic_path(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def sync_path(path: Path) -> None:
    """Puts a regular file that someone has written on the disk. Raises OSError, also for a link."""
    descriptor = open_file(path, os.O_RDONLY)
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[IO[bytes]]:
    """As `atomic_path`, a file opened for writing; its folder is made. DataError when the file system refuses."""
    path = Path(path)
    with data_errors(path):
        make_folder(path.parent)
        with atomic_path(path) as partial, open(partial, "wb") as file:
            yield file


@contextlib.contextmanager
def data_errors(path: object) -> Iterator[None]:
    """Makes a DataError of what the file system says against writing `path`."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror or error}; free some space or choose another place"
        ) from error
