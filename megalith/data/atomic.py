"""Files that are whole or absent: written under another name, made durable, then renamed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megalith.errors import DataError
from megalith.io import make_folder, replacing


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """A file opened for writing bytes that takes the name `path` only on a clean exit.

    Until then it stands beside it under a random name, and an exception removes it. The parent folder is made.
    DataError when the file system refuses.
    """
    path = Path(path)
    with writing(path):
        make_folder(path.parent)
        with replacing(path) as partial, open(partial, "wb") as file:
            yield file


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes a DataError of what the file system says against writing `path`."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror}; free some space or choose another path"
        ) from error
