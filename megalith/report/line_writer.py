"""A text file to which lines are appended, which tolerates a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
import warnings
from pathlib import Path

from megalith.io import open_file


class LineWriter:
    """Appends lines to a file and flushes each to the operating system, so that a killed process loses none.

    Lines that a full disk rejects are buffered and written, in order, when there is space again: a full disk does not
    end a run. The first rejected write prints a warning. A handle that became stale when the server of a network disk
    restarted is opened again. Only one process may have the file open.
    """

    def __init__(self, path: Path, lazy: bool = False):
        """Open the file, or with `lazy` when the first line is written. Raises OSError if it cannot be opened now."""
        self._path = path
        self._descriptor: int | None = None
        self._is_checked = False  # the file's last line is complete
        self._buffer = b""
        self._failing = False
        if not lazy:
            self._open()

    def write(self, line: str) -> None:
        """Append a line. `line` must not end with a newline."""
        self._buffer += line.encode() + b"\n"
        self._flush("its lines are buffered until it can")

    def close(self) -> None:
        """Close the file. Lines that the disk still rejects are lost, with a warning."""
        if self._buffer:
            self._failing = False
            self._flush("its last lines are lost")
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            try:
                os.close(descriptor)
            except OSError as error:  # a network disk may report a failed write only here
                self._warn(error, "its last lines may be lost")

    def _flush(self, consequence: str) -> None:
        try:
            self._write_buffer()
            self._failing = False
        except OSError as error:
            if not self._failing:
                self._warn(error, consequence)
            self._failing = True

    def _write_buffer(self) -> None:
        try:
            self._open()
            while self._buffer:  # a disk that is almost full may write a part
                self._buffer = self._buffer[os.write(self._descriptor, self._buffer) :]
        except OSError as error:
            if error.errno == errno.ESTALE and self._descriptor is not None:  # the next write opens it again
                with contextlib.suppress(OSError):
                    os.close(self._descriptor)
                self._descriptor = None
            raise

    def _warn(self, error: OSError, consequence: str) -> None:
        warnings.warn(f"{self._path} could not be written: {error.strerror}; {consequence}", stacklevel=4)

    def _open(self) -> None:
        if self._descriptor is not None:
            return
        self._descriptor = open_file(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        size = 0 if self._is_checked else os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            self._buffer = b"\n" + self._buffer  # a crash cut the last line off
        self._is_checked = True
