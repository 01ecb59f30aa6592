"""How far a conversion has come and how fast: a bar on a terminal, one line at the end elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


class ByteProgress:
    """A context manager; `add` counts bytes that are done."""

    def __init__(self, title: str, total: int, show: bool = True):
        self._title, self._total, self._show = title, total, show
        self.done = 0

    def __enter__(self) -> ByteProgress:
        self._start = time.monotonic()
        self._stack, self._bar = ExitStack(), None
        if self._show and sys.stderr.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TextColumn("{task.fields[rate]}"),
            )
            self._bar = self._stack.enter_context(
                Progress(*columns, TimeRemainingColumn(), console=Console(file=sys.stderr))
            )
            self._task = self._bar.add_task(self._title, total=self._total, rate="")
        return self

    def add(self, count: int) -> None:
        """`count` more bytes are done."""
        self.done += count
        if self._bar:
            self._bar.update(self._task, completed=self.done, rate=f"{self.rate:.2f} GB/s")

    @property
    def rate(self) -> float:
        """GB (10⁹ bytes) a second so far."""
        return self.done / 1e9 / max(time.monotonic() - self._start, 1e-9)

    def __exit__(self, kind: object, *error: object) -> None:
        self._stack.close()
        if self._show and kind is None:
            seconds = time.monotonic() - self._start
            print(
                f"{self._title}: {self.done / 1e9:.2f} GB in {seconds:.1f} s, {self.rate:.2f} GB/s",
                file=sys.stderr,
            )
