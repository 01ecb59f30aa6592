"""How far a long command has come, on standard error: a live line on a terminal, a plain line now and then elsewhere.

What ends within two seconds says nothing, so that short commands stay quiet, and standard output is for the results.
"""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TextIO

QUIET = 2.0  # seconds in which nothing is said
REDRAWN = 0.1  # seconds between two states of the live line
LINE_INTERVAL = 10.0  # seconds between two plain lines
BAR, SHORTEST = 20, 5  # columns
NARROWEST = 20  # columns of a terminal with a live line
BYTES = "bytes"


class Progress(AbstractContextManager):
    """A context manager; `add` counts what is done, `update` takes the total so far.

    It draws within `add` and `update` and has no thread, which might hold a lock while another process is forked.
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
        """`total`: in `unit`, bytes or a plural such as "layouts"; None where nobody knows it: without a share and an
        ETA. `stream`: standard error by default."""
        self._title, self._total, self._unit = title, total or None, unit
        self._stream = (sys.stderr if stream is None else stream) if show else None
        self._live = self._figures = None
        self._said, self._bar = False, BAR
        self.done = 0.0
        self._start = time.monotonic()
        self._next = self._start + QUIET

    def add(self, amount: float = 1) -> None:
        """So much more is done."""
        self.update(self.done + amount)

    def update(self, done: float, figures: str | None = None) -> None:
        """So much is done in all; `figures` stand in the place of how much, and of the speed."""
        self.done, self._figures = done, figures
        now = time.monotonic()
        if self._stream is not None and now >= self._next:
            self._say(now)

    def _say(self, now: float) -> None:
        seconds = now - self._start
        if not self._said:
            self._said, self._live = True, live_line(self._stream)
        figures, left = self._figures or self._amounts(seconds), self._left(seconds)
        if self._live is None:
            print(f"{self._title}: {_joined(self._share(), figures, left)}", file=self._stream, flush=True)
        else:
            taken = left or str(timedelta(seconds=round(seconds)))
            self._live.start()
            self._live.update(self._drawn(_joined(self._share(), taken, figures)), refresh=True)
        self._next = now + (LINE_INTERVAL if self._live is None else REDRAWN)

    def _drawn(self, figures: str):
        """The live line: where it does not fit the bar is shorter, then gone, and then its end is cut off."""
        from rich.text import Text

        full, empty = "#-" if self._live.console.options.ascii_only else "━╌"
        room = self._live.console.width - len(f"{self._title}  {figures}")
        self._bar = min(self._bar, room)  # and not longer again with shorter figures
        columns = self._bar if self._total and self._bar >= SHORTEST else 0
        done = round(columns * min(self.done / self._total, 1)) if columns else 0
        bar = [(done * full, "green"), ((columns - done) * empty, "dim"), " "] if columns else []
        return Text.assemble(f"{self._title} ", *bar, figures, no_wrap=True, overflow="crop", end="")

    def _share(self) -> str:
        return f"{100 * self.done / self._total:.1f} %" if self._total else ""

    def _left(self, seconds: float) -> str:
        """By the mean speed so far."""
        if not self._total or not self.done:
            return ""
        left = max(self._total - self.done, 0) / self.done * seconds
        return f"ETA {timedelta(seconds=round(left))}"

    def _amounts(self, seconds: float) -> str:
        """`1.20 of 6.40 GB | 0.31 GB/s`, `12 of 40 layouts | 1.3 layouts/s`"""
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
        """What it counted, and how long that took, stays as a plain line, if anything was said."""
        if self._live is not None:
            self._live.stop()
        if self._said and self._figures is None:
            seconds = time.monotonic() - self._start
            done = self._amounts(seconds).replace(" | ", f" in {seconds:.1f} s, ")
            print(f"{self._title}: {done}", file=self._stream, flush=True)


def _joined(*words: str) -> str:
    return " | ".join(filter(None, words))


def supports_live_line(console) -> bool:
    """Whether a console of rich can redraw a line, and is wide enough for one."""
    return not console.is_dumb_terminal and console.width >= NARROWEST


def live_line(stream: TextIO):
    """Of rich; None where `stream` is no terminal that can redraw a line, or says that it has no width."""
    if not stream.isatty():
        return None
    from rich.console import Console
    from rich.live import Live

    console = Console(file=stream)
    if not supports_live_line(console):
        return None
    above = sys.stdout.isatty()  # what is printed goes above the line; a file gets it as it is
    return Live(console=console, auto_refresh=False, transient=True, redirect_stdout=above)
