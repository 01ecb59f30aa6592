"""Durable and atomic writes to local files. They never follow symbolic links.

A synced file is still lost if its folder's entry is not synced, so folders are synced too. An output folder may come
from someone else and contain symbolic links in place of the files that a run writes, so writes refuse to follow them.
Links in the path to the output folder were made by the user and are followed. remote.py handles object stores.
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

LINK = "it is a symbolic link, and writes do not follow links"
NO_FILE = "it is not a regular file"


def make_folder(folder: Path) -> None:
    """Create a folder and its parents if absent, and sync their entries. Raises OSError."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in created:
        with contextlib.suppress(PermissionError):  # the parent may be writable but not readable
            sync_folder(path.parent)


def make_subfolder(folder: Path) -> Path:
    """Create a folder inside an output folder if absent, and return it. Raises OSError if it is a link."""
    reject_symlink(folder)
    make_folder(folder)
    return folder


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries (new files, renames) to disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(file: IO | int) -> None:
    """Flush and sync an open file to disk. Raises OSError."""
    if not isinstance(file, int):
        file.flush()
    os.fsync(file if isinstance(file, int) else file.fileno())


def write_file(path: Path, content: str | bytes) -> None:
    """Write and sync a file. Text is encoded as UTF-8. Raises OSError."""
    with open(path, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        sync_file(file)


def replace_folder(new: Path, name: Path, aside: Path) -> Path | None:
    """Rename the folder `new`, whose files are synced, to `name`, atomically if the filesystem can.

    Filesystems without an atomic exchange (NFS, Lustre) take two renames, the first one to `aside`.

    Returns:
        The current path of the folder that was called `name` before, or None if there was none.

    Raises:
        OSError: a rename failed, or `aside` exists.
    """
    old = None
    if not os.path.lexists(name):
        os.replace(new, name)
    elif exchange(new, name):
        old = new
    elif os.path.lexists(aside):
        raise FileExistsError(
            errno.EEXIST, f"already exists, so the old {name.name} cannot be moved there", str(aside)
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
    """Exchange two paths atomically. Returns False if the system cannot. Raises OSError."""
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
    """Open a regular file as os.open does, and return its descriptor. Raises OSError, also for a link or a pipe."""
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
    """Raise OSError if `path` is a symbolic link."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, LINK, str(path))


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield an empty temporary file that is renamed to `path` on a clean exit and removed after an error.

    Readers see either the old or the new content, also after a crash. Raises OSError.
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
    """Replace a file's content atomically and durably. Text is encoded as UTF-8. Raises OSError.

    Temporary files of killed processes are removed, so only one process may write the file.
    """
    for left in path.parent.iterdir():
        if re.fullmatch(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.tmp", left.name):
            left.unlink(missing_ok=True)
    with atomic_path(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def sync_path(path: Path) -> None:
    """Sync a regular file to disk. Raises OSError, also for a link."""
    descriptor = open_file(path, os.O_RDONLY)
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file for atomic writing, as `atomic_path`, and create its folder. Raises DataError if it fails."""
    path = Path(path)
    with data_errors(path):
        make_folder(path.parent)
        with atomic_path(path) as partial, open(partial, "wb") as file:
            yield file


@contextlib.contextmanager
def data_errors(path: object) -> Iterator[None]:
    """Raise a DataError in place of an OSError that occurs while `path` is written."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror or error}; free some space or choose another path"
        ) from error
