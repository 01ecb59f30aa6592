"""Folders whose entries are on the disk when we say so: a file is lost with its folder's entry, however well synced."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def make_folder(folder: Path) -> None:
    """Makes a folder, and those above it, where they are absent; their entries are then on the disk. Raises OSError."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in made:
        with contextlib.suppress(
            PermissionError
        ):  # one may be allowed to write in a folder, but not to open it
            sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Puts a folder's entries (new files, renames) on the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
