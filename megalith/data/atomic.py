"""Files that are whole or absent: written under another name, made durable, then renamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

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
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror}; free some space or choose another place"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
