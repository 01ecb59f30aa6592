"""A text file that lines are appended to, for as long as the disk takes them."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from megalith.io import open_file


class LineFile:
    """Hands each line to the system at once, so that a killed process loses none.

    What a full disk refuses waits in memory and is written, in order, with the next line that finds room: a run's log
    is no reason to end it. A warning tells of the first refusal. One process has a file open. Raises OSError only when
    it is made, and not with `late`: then the first line opens the file.
    """

    def __init__(self, path: Path, late: bool = False):
        self._path = path
        self._descriptor: int | None = None
        self._waiting = b""
        self._refused = False
        if not late:
            self._open()

    def write(self, line: str) -> None:
        """Appends a line, without its end."""
        self._waiting += line.encode() + b"\n"
        try:
            self._open()
            while self._waiting:  # a disk that fills up takes a part
                self._waiting = self._waiting[os.write(self._descriptor, self._waiting) :]
            self._refused = False
        except OSError as error:
            if not self._refused:
                warnings.warn(
                    f"{self._path} could not be written: {error.strerror}; its lines are kept in memory until it can",
                    stacklevel=2,
                )
            self._refused = True

    def close(self) -> None:
        """Closes the file; lines that no room was found for are lost."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> None:
        if self._descriptor is not None:
            return
        self._descriptor = open_file(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            self._waiting = b"\n" + self._waiting  # a crash has cut the last line off before its end
