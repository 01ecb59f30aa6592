"""Progress of long commands on standard error: a live line on a terminal, otherwise a plain line every 10 s.

Commands that end within two seconds print nothing. Standard output is reserved for results.
"""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TextIO

QUIET = 2.0  # seconds before anything is printed
REDRAW_INTERVAL = 0.1  # seconds between updates of the live line
LINE_INTERVAL = 10.0  # seconds between plain lines
BAR, MIN_BAR = 20, 5  # columns
MIN_WIDTH = 20  # columns of a terminal with a live line
BYTES = "bytes"


class Progress(AbstractContextManager):
    """Context manager that prints progress from `add` and `update`.

    It uses no thread, because a thread might hold a lock during a fork.

    Args:
        title: name of the command.
        total: total amount in `unit`, or None if unknown, which omits the percentage and the ETA.
        unit: "bytes", or a plural such as "layouts".
        show: False prints nothing.
        stream: standard error by default.
    """

    def __init__(
        self,
        title: str,
        total: float | None,
        unit: str = BYTES,
        *,
        show: bool = True,
        stream: TextIO | None = None,
    ):

        self._title, self._total, self._unit = title, total or None, unit
        self._stream = (sys.stderr if stream is None else stream) if show else None
        self._live = self._figures = None
        self._has_printed, self._bar = False, BAR
        self.done = 0.0
        self._start = time.monotonic()
        self._next = self._start + QUIET

    def add(self, amount: float = 1) -> None:
        """Increase the amount done."""
        self.update(self.done + amount)

    def update(self, done: float, figures: str | None = None) -> None:
        """Set the amount done. `figures` replaces the amount and the speed in the output."""
        self.done, self._figures = done, figures
        now = time.monotonic()
        if self._stream is not None and now >= self._next:
            self._print(now)

    def _print(self, now: float) -> None:
        seconds = now - self._start
        if not self._has_printed:
            self._has_printed, self._live = True, live_line(self._stream)
        figures, left = self._figures or self._amounts(seconds), self._remaining(seconds)
        if self._live is None:
            print(
                f"{self._title}: {_joined(self._percentage(), figures, left)}", file=self._stream, flush=True
            )
        else:
            time_text = left or str(timedelta(seconds=round(seconds)))
            self._live.start()
            self._live.update(self._live_text(_joined(self._percentage(), time_text, figures)), refresh=True)
        self._next = now + (LINE_INTERVAL if self._live is None else REDRAW_INTERVAL)

    def _live_text(self, figures: str):
        """Return the live line. If it does not fit, the bar shrinks, then disappears, and then the text is cropped."""
        from rich.text import Text

        full, empty = "#-" if self._live.console.options.ascii_only else "━╌"
        room = self._live.console.width - len(f"{self._title}  {figures}")
        self._bar = min(self._bar, room)  # never grows again
        columns = self._bar if self._total and self._bar >= MIN_BAR else 0
        done = round(columns * min(self.done / self._total, 1)) if columns else 0
        bar = [(done * full, "green"), ((columns - done) * empty, "dim"), " "] if columns else []
        return Text.assemble(f"{self._title} ", *bar, figures, no_wrap=True, overflow="crop", end="")

    def _percentage(self) -> str:
        return f"{100 * self.done / self._total:.1f} %" if self._total else ""

    def _remaining(self, seconds: float) -> str:
        """Return `ETA h:mm:ss` at the mean speed so far, or "" if it is unknown."""
        if not self._total or not self.done:
            return ""
        left = max(self._total - self.done, 0) / self.done * seconds
        return f"ETA {timedelta(seconds=round(left))}"

    def _amounts(self, seconds: float) -> str:
        """Return the amount and the speed, such as `1.20 of 6.40 GB | 0.31 GB/s`."""
        if self._unit == BYTES:
            size, unit = (1e9, "GB") if max(self._total or 0, self.done) >= 1e9 else (1e6, "MB")
            done, speed, of = f"{self.done / size:.2f}", f"{self.done / size / seconds:.2f}", size
        else:
            done, unit, of = f"{self.done:,.0f}", self._unit, 1
            rate = self.done / seconds
            speed = f"{rate:,.0f}" if rate >= 100 else f"{rate:.2g}"
        total = "" if not self._total else f" of {self._total / of:,.{0 if of == 1 else 2}f}"
        return f"{done}{total} {unit} | {speed} {unit}/s"

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self.end()
        elif self._live is not None:
            self._live.stop()

    def end(self) -> None:
        """Print the final amount and duration as a plain line, if anything was printed before."""
        if self._live is not None:
            self._live.stop()
        if self._has_printed and self._figures is None:
            seconds = time.monotonic() - self._start
            done = self._amounts(seconds).replace(" | ", f" in {seconds:.1f} s, ")
            print(f"{self._title}: {done}", file=self._stream, flush=True)


def _joined(*words: str) -> str:
    return " | ".join(filter(None, words))


def supports_live_line(console) -> bool:
    """Return True if a rich console can redraw a line and has at least MIN_WIDTH columns."""
    return not console.is_dumb_terminal and console.width >= MIN_WIDTH


def live_line(stream: TextIO):
    """Return rich's Live for a terminal that can redraw a line; None for other streams."""
    if not stream.isatty():
        return None
    from rich.console import Console
    from rich.live import Live

    console = Console(file=stream)
    if not supports_live_line(console):
        return None
    redirect = sys.stdout.isatty()  # print above the live line, unless standard output is a file
    return Live(console=console, auto_refresh=False, transient=True, redirect_stdout=redirect)
