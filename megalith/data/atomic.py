"""Files that are whole or absent: written under another name, made durable, then renamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megalith.disk import make_folder, sync_folder
from megalith.errors import DataError


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """A file opened for writing bytes that takes the name `path` only on a clean exit.

    Until then it stands at `{path}.partial-{pid}`, and an exception removes it. The parent folder is made.
    DataError when the file system refuses.
    """
    path = Path(path)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        with writing(path):
            make_folder(path.parent)
            with open(partial, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
            sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes a DataError of what the file system says against writing `path`."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror}; free some space or choose another place"
        ) from error
