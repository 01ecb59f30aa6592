"""Files and folders that are on the disk when we say so, and that nobody has put elsewhere.

A file is lost with its folder's entry, however well synced, so folders are synced too. A folder that is written into
may have come from someone else, with symbolic links in the place of the files that a run writes: what is written here
never goes through one. Links above the folder are the user's own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

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
    refuse_link(folder)
    make_folder(folder)
    return folder


def sync_folder(folder: Path) -> None:
    """Puts a folder's entries (new files, renames) on the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def refuse_link(path: Path) -> None:
    """Raises OSError where `path` is a symbolic link."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, LINK, str(path))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file beside `path` that takes its name on a clean exit, and goes after an error. Raises OSError.

    A reader, and whoever comes after a crash, finds the old content or the new, whole. The name until then is random.
    """
    refuse_link(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    os.close(open_file(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    try:
        yield partial
        _sync(partial)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    sync_folder(path.parent)


def replace_file(path: Path, content: str | bytes) -> None:
    """Gives a file new content, text as UTF-8, at once and on the disk (see `replacing`). Raises OSError.

    It is this process's own: what a killed one has left beside it goes.
    """
    for left in path.parent.iterdir():
        if re.fullmatch(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.tmp", left.name):
            left.unlink(missing_ok=True)
    with replacing(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def _sync(path: Path) -> None:
    descriptor = open_file(path, os.O_WRONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
