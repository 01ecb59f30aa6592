"""Safe reading of small, untrusted files: a config.json, a manifest, a tokenizer's files.

Such a file must be a regular file of bounded size inside the folder that the user named. A pipe would block its reader,
a device such as /dev/zero or a huge sparse file would fill memory, and a symbolic link out of the folder would copy the
user's own files into checkpoints and exports. The only links allowed out of the folder are the links of a Hugging Face
hub cache, whose snapshots link to the blobs of the same repository.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

from megalith.remote import StorePath

LARGEST = 2**27  # bytes; the largest tokenizer.json in use has some 35 MB
REPOSITORY = re.compile(r"(models|datasets|spaces)--.+")


class RefusedFile(OSError):
    """A file that is rejected for its type, size or location, not for an I/O error."""


def read_small_file(path: Path | StorePath, folder: Path | StorePath, largest: int = LARGEST) -> bytes:
    """Return the content of a file in a folder that is not trusted.

    Args:
        path: the file.
        folder: folder named by the user. The file must be in it after all links are resolved.
        largest: maximum size of the file in bytes.

    Raises:
        RefusedFile: the path is not a regular file, is a link out of the folder, or the file is too large.
        OSError: the file is missing or cannot be read.
    """
    if isinstance(path, Path):
        return read_bounded(resolve_inside(path, Path(str(folder))), largest, path)
    _check_size(path, path.size(), largest)
    return path.read_bytes()


def read_optional_file(path: Path, folder: Path, largest: int = LARGEST) -> bytes | None:
    """Return the content as `read_small_file` does, or None if there is no such file. Raises OSError."""
    try:
        return read_small_file(path, folder, largest)
    except FileNotFoundError:
        return None


def read_bounded(path: Path, largest: int = LARGEST, name: Path | None = None) -> bytes:
    """Return the content of a regular file whose path the user gave, links included. Raises OSError.

    `name` is the path that errors show.
    """
    name = name or path
    with _open_regular(path, name) as file:
        size = os.fstat(file.fileno()).st_size
        _check_size(name, size, largest)
        content = file.read(size + 1)  # reserves no more memory than the file needs
        if len(content) > size:  # it has grown
            content += file.read(largest - size)
    _check_size(name, len(content), largest)
    return content


def resolve_regular(path: Path, folder: Path) -> Path:
    """Return the resolved path of a regular file of any size, for a caller that maps it or reads it in chunks.

    Raises:
        RefusedFile: the path is not a regular file, or is a link out of `folder`.
        OSError: it is missing or cannot be opened.
    """
    real = resolve_inside(path, folder)
    _open_regular(real, path).close()
    return real


def _open_regular(path: Path, name: Path) -> BinaryIO:
    """Open a file without waiting for a pipe's writer. Raises RefusedFile where it is not regular."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:  # Python 3.13 does not raise in `resolve`
            raise _circle(name) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise RefusedFile(errno.EISDIR, "it is a folder, not a file", str(name))
    raise RefusedFile(errno.EINVAL, "it is a pipe, a socket or a device, not a file", str(name))


def _circle(path: Path) -> RefusedFile:
    return RefusedFile(errno.ELOOP, "its symbolic links lead in a circle", str(path))


def resolve_inside(path: Path, folder: Path) -> Path:
    """Return the file that `path` leads to. Raises OSError if it is outside of `folder`."""
    try:
        real, root = path.resolve(), folder.resolve()
    except RuntimeError:  # Python 3.11 and 3.12 for links in a circle
        raise _circle(path) from None
    if real.is_relative_to(root) or any(real.is_relative_to(blobs) for blobs in _hub_blobs(root)):
        return real
    raise RefusedFile(
        errno.EPERM,
        f"it is a symbolic link that leads out of its folder, to {real} (put a copy there if it is to be used)",
        str(path),
    )


def _hub_blobs(folder: Path) -> list[Path]:
    """Return the blob folders of the Hugging Face hub repositories that have a snapshot at or above a folder."""
    return [
        snapshots.parent / "blobs"
        for snapshots in (folder, *folder.parents)
        if snapshots.name == "snapshots" and REPOSITORY.fullmatch(snapshots.parent.name)
    ]


def _check_size(path: Path | StorePath, size: int, largest: int) -> None:
    if size > largest:
        raise RefusedFile(
            errno.EFBIG, f"it has {size:,} bytes, and such a file at most {largest:,}", str(path)
        )
