"""A text file that lines are appended to, for as long as the disk takes them."""

from __future__ import annotations

import os
import warnings
from pathlib import Path


class LineFile:
    """Hands each line to the system at once, so that a killed process loses none.

    What a full disk refuses waits in memory and is written, in order, with the next line that finds room: a run's log
    is no reason to end it. A warning tells of the first refusal. One process has a file open. Raises OSError only when
    it is opened.
    """

    def __init__(self, path: Path):
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._waiting = b""
        self._refused = False

    def write(self, line: str) -> None:
        """Appends a line, without its end."""
        self._waiting += line.encode() + b"\n"
        try:
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
        os.close(self._descriptor)
