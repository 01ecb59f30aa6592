"""`megalith watch`: several runs in a terminal, from what they write, here or in a store.

A row a run: how far it is, its newest figures, the time left by its last steps, and when it wrote last. Whatever a file
holds, a row shows it or a dash.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megalith.errors import printable
from megalith.remote import StorePath, modified, open_location
from megalith.report.metrics import EVALUATIONS_FILE, EVENTS_FILE, METRICS_FILE
from megalith.report.page.charts import sparkline
from megalith.report.page.run_files import Record, number, points, run_settings, tail
from megalith.report.plot import run_names
from megalith.tables import format_si

NEWEST = 128 * 1024  # bytes of a file that a look reads
MEAN_OF = 20  # steps that the time left is reckoned by
QUIET = 10  # step times, and as many seconds, after which a run has stopped writing
EVENTS_SHOWN = 5
COLUMNS = (
    "run",
    "step",
    "loss",
    "",
    "reward",
    "validation",
    "lr",
    "tok/s/device",
    "MFU",
    "GB",
    "left",
    "wrote",
)
NARROW = {  # of a terminal below so many columns
    60: ("run", "step", "loss", "left"),
    120: ("run", "step", "loss", "", "reward", "left", "wrote"),
}


def watch(
    folders: Sequence[str],
    console: Console,
    interval: float,
    once: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Shows the runs until all have ended, anew every `interval` seconds; once where `once`."""
    runs = dict(zip(run_names(folders), map(open_location, folders)))
    if once:
        console.print(_screen(runs, console.width)[0])
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        while True:
            shown, all_ended = _screen(runs, console.width)
            live.update(shown, refresh=True)
            if all_ended:
                return
            sleep(interval)


def _screen(runs: dict[str, Path | StorePath], width: int) -> tuple[Group, bool]:
    """A row a run with the newest events below, and whether every run has made its last step."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    looks = [RunSnapshot(printable(name), folder) for name, folder in runs.items()]
    fitting = next((headings for below, headings in NARROW.items() if width < below), COLUMNS)
    absent = () if any(look.has_rewards for look in looks) else ("reward",)
    shown = [n for n, heading in enumerate(COLUMNS) if heading in fitting and heading not in absent]
    for n in shown:
        table.add_column(COLUMNS[n], justify="left" if n == 0 else "right", no_wrap=n > 0, overflow="fold")
    for look in looks:
        row = look.row()
        table.add_row(*(row[n] for n in shown))
    events = [line for look in looks for line in look.events()]
    return Group(table, *events), all(look.ended for look in looks)


class RunSnapshot:
    """What a run's files say at one moment; nothing where they cannot be read."""

    def __init__(self, name: str, folder: Path | StorePath):
        self.name, self._folder = name, folder
        self._steps = self._read(METRICS_FILE)
        self._last: Record = self._steps[-1] if self._steps else {}
        self._total = _whole(run_settings(folder).get("train.train_iters"))

    def _read(self, name: str) -> list[Record]:
        try:
            return tail(self._folder / name, NEWEST)
        except OSError:
            return []

    @property
    def step(self) -> int:
        return int(number(self._last.get("step")) or 0)

    @property
    def ended(self) -> bool:
        return self._total is not None and self.step >= self._total

    @property
    def has_rewards(self) -> bool:
        """Whether it is a run of GRPO."""
        return number(self._last.get("rewards_mean")) is not None

    def row(self) -> list[Text]:
        """A cell for each of COLUMNS."""
        steps = f"{self.step:,}" + (f"/{self._total:,}" if self._total else "")
        checks = points(self._read(EVALUATIONS_FILE), "validation_loss")
        cells = [
            self.name,
            steps,
            self._figure("loss", "{:.4f}"),
            sparkline([loss for _, loss in points(self._steps, "loss")]),
            self._figure("rewards_mean", "{:.4f}"),
            f"{checks[-1][1]:.4f}" if checks else "–",
            self._figure("lr", "{:.2e}"),
            format_si(speed) if (speed := number(self._last.get("tokens_per_second_per_device"))) else "–",
            self._figure("mfu", "{:.1%}"),
            self._figure("max_memory_gb", "{:.1f}"),
            self._left(),
        ]
        return [*map(Text, cells), self._age()]

    def events(self) -> list[Text]:
        """The newest, one a line."""
        shown = self._read(EVENTS_FILE)[-EVENTS_SHOWN:]
        return [
            Text(printable(f"{self.name}, {e.get('time')}: {e.get('text')}"), style="yellow") for e in shown
        ]

    def _figure(self, key: str, form: str) -> str:
        value = number(self._last.get(key))
        return "–" if value is None else form.format(value)

    def _step_seconds(self) -> float:
        times = [ms for _, ms in points(self._steps[-MEAN_OF:], "step_time_ms")]
        return sum(times) / len(times) / 1e3 if times else 0.0

    def _left(self) -> str:
        if self.ended:
            return "done"
        seconds = ((self._total or 0) - self.step) * self._step_seconds()
        return str(timedelta(seconds=round(seconds))) if 0 < seconds < 1e9 else "–"

    def _age(self) -> Text:
        """How long ago it wrote; red where a run should have written since."""
        try:
            written = modified(self._folder / METRICS_FILE)
        except OSError:
            return Text("not yet", style="dim")
        seconds = (datetime.now(written.tzinfo) - written).total_seconds()
        late = not self.ended and seconds > QUIET * (1 + self._step_seconds())
        return Text(f"{timedelta(seconds=max(0, round(seconds)))} ago", style="bold red" if late else "dim")


def _whole(value: str | None) -> int | None:
    return int(value) if value and value.isdecimal() and len(value) < 15 else None
