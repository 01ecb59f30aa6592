"""A text file that lines are appended to, also while the disk is full."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from megalith.io import open_file


class LineWriter:
    """Appends lines to a file and passes each to the operating system at once, so that a killed process loses none.

    Lines that a full disk rejects are buffered and written, in order, when there is space again: a full disk does not
    end a run. The first rejected write prints a warning. Only one process may have the file open.
    """

    def __init__(self, path: Path, lazy: bool = False):
        """Open the file, or with `lazy` when the first line is written. Raises OSError if it cannot be opened now."""
        self._path = path
        self._descriptor: int | None = None
        self._buffer = b""
        self._failing = False
        if not lazy:
            self._open()

    def write(self, line: str) -> None:
        """Append a line, given without its newline."""
        self._buffer += line.encode() + b"\n"
        try:
            self._open()
            while self._buffer:  # a disk that is almost full may write a part
                self._buffer = self._buffer[os.write(self._descriptor, self._buffer) :]
            self._failing = False
        except OSError as error:
            if not self._failing:
                warnings.warn(
                    f"{self._path} could not be written: {error.strerror}; its lines are buffered until it can",
                    stacklevel=2,
                )
            self._failing = True

    def close(self) -> None:
        """Close the file. Lines that are still buffered are lost."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> None:
        if self._descriptor is not None:
            return
        self._descriptor = open_file(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            self._buffer = b"\n" + self._buffer  # a crash cut the last line off
