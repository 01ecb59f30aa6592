"""Temporary folders that are deleted even if their process is killed.

A killed process cannot delete its folders, and fetched checkpoints would fill the disk. Each folder therefore contains
a file that its process keeps locked. The kernel releases the lock when the process ends, however it ends. The next
process that makes a folder with the same prefix deletes the folders whose lock nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from megalith.io import open_file

OWNER = ".owner"  # the locked file


class TemporaryFolder:
    """A folder in the system's temporary folder, until `remove`. Raises OSError.

    Args:
        prefix: first part of the folder's name.

    Attributes:
        path: the folder. It contains only the locked file.
    """

    def __init__(self, prefix: str):
        _remove_abandoned(prefix)
        made = Path(tempfile.mkdtemp(prefix=f".{prefix}"))
        self._descriptor: int | None = open_file(made / OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        with contextlib.suppress(OSError):  # a filesystem without locks, where nobody deletes it
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = made.with_name(made.name.removeprefix("."))
        made.rename(self.path)  # only now: an unlocked folder with this prefix counts as abandoned

    def remove(self) -> None:
        """Delete the folder, ignoring errors. Further calls do nothing."""
        if self._descriptor is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._descriptor)
            self._descriptor = None


def _remove_abandoned(prefix: str) -> None:
    """Delete this user's folders whose process has ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # its process runs, it has no owner's file, or its deletion fails
            descriptor = open_file(folder / OWNER, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.geteuid():
                    shutil.rmtree(folder)
            finally:
                os.close(descriptor)
