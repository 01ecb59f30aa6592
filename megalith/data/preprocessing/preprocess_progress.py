"""Shows how far a long read has come: a live bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import TextIO

LINE_INTERVAL_SECONDS = 10.0


class Progress:
    """A context manager; `update` takes the totals so far. The share and ETA go by bytes of the input files."""

    def __init__(self, title: str, total_bytes: int, stream: TextIO | None = None) -> None:
        """`stream`: standard error by default."""
        self._title, self._total = title, max(total_bytes, 1)
        self._stream = sys.stderr if stream is None else stream
        self._bar = None
        if self._stream.isatty():
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.TaskProgressColumn(),
                progress.TextColumn("{task.fields[figures]}"),
                progress.TextColumn("ETA"),
                progress.TimeRemainingColumn(),
                console=Console(file=self._stream),
            )
            self._task = self._bar.add_task(title, total=self._total, figures="")

    def __enter__(self) -> Progress:
        self._start = self._last_line = time.monotonic()
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, position: int, documents: int, tokens: int, text_bytes: int) -> None:
        """`position`: bytes of the (compressed) input files; `text_bytes`: the same uncompressed."""
        now = time.monotonic()
        seconds = max(now - self._start, 1e-9)
        if self._bar:
            self._bar.update(
                self._task, completed=position, figures=figures(documents, tokens, text_bytes, seconds)
            )
        elif now - self._last_line >= LINE_INTERVAL_SECONDS:
            self._last_line = now
            left = timedelta(seconds=round(seconds * (self._total - position) / max(position, 1)))
            print(
                f"{self._title}: {100 * position / self._total:.1f} % | "
                f"{figures(documents, tokens, text_bytes, seconds)} | ETA {left}",
                file=self._stream,
                flush=True,
            )


def figures(documents: int, tokens: int, text_bytes: int, seconds: float) -> str:
    """`1,234 documents | 5,678 tokens | 2.31 M tokens/s | 8.4 MB/s`"""
    return (
        f"{documents:,} documents | {tokens:,} tokens | {tokens / seconds / 1e6:.2f} M tokens/s | "
        f"{text_bytes / seconds / 1e6:.1f} MB/s"
    )
