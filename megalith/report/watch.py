"""`megalith watch`: several runs in a terminal, read from their folders, local or in a store.

Each run has a row with its progress, newest metrics, remaining time and the time since its last write. Values that are
missing or invalid are shown as a dash.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megalith.errors import printable
from megalith.remote import StorePath, modified, open_location
from megalith.report.metrics import EVALUATIONS_FILE, EVENTS_FILE, METRICS_FILE
from megalith.report.run_files import Record, metric_points, run_names, run_settings, tail, to_float
from megalith.report.text_curve import sparkline
from megalith.tables import format_si

TAIL_BYTES = 128 * 1024  # read from the end of a file
ETA_STEPS = 20  # steps from which the remaining time is estimated
LATE_FACTOR = 10  # a run is late after this many step times plus as many seconds without a write
MAX_EVENTS = 5  # shown per run
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
NARROW_COLUMNS = {  # terminal narrower than this → columns
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
    """Show the runs and refresh every `interval` seconds until all have ended. `once`: print once and return."""
    runs = dict(zip(run_names(folders), map(open_location, folders)))
    if once:
        console.print(_screen(runs, console.width)[0])
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        while True:
            screen, all_ended = _screen(runs, console.width)
            live.update(screen, refresh=True)
            if all_ended:
                return
            sleep(interval)


def snapshots(folders: Sequence[str]) -> list[dict[str, Any]]:
    """Return the state of the runs, for programs."""
    runs = dict(zip(run_names(folders), map(open_location, folders)))
    return [RunSnapshot(name, folder).document() for name, folder in runs.items()]


def _screen(runs: dict[str, Path | StorePath], width: int) -> tuple[Group, bool]:
    """Return the table of the runs with their newest events, and True if all runs have ended."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    snapshots = [RunSnapshot(printable(name), folder) for name, folder in runs.items()]
    fitting = next((headings for limit, headings in NARROW_COLUMNS.items() if width < limit), COLUMNS)
    unused = () if any(snapshot.has_rewards for snapshot in snapshots) else ("reward",)
    shown = [n for n, heading in enumerate(COLUMNS) if heading in fitting and heading not in unused]
    for n in shown:
        table.add_column(COLUMNS[n], justify="left" if n == 0 else "right", no_wrap=n > 0, overflow="fold")
    for snapshot in snapshots:
        row = snapshot.row()
        table.add_row(*(row[n] for n in shown))
    events = [line for snapshot in snapshots for line in snapshot.events()]
    return Group(table, *events), all(snapshot.ended for snapshot in snapshots)


class RunSnapshot:
    """The newest records of a run's files. The records of a file that cannot be read are empty."""

    def __init__(self, name: str, folder: Path | StorePath):
        self.name, self._folder = name, folder
        self._steps = self._read(METRICS_FILE)
        self._last: Record = self._steps[-1] if self._steps else {}
        self._total = _parse_steps(run_settings(folder).get("train.train_iters"))

    def _read(self, name: str) -> list[Record]:
        try:
            return tail(self._folder / name, TAIL_BYTES)
        except OSError:
            return []

    @property
    def step(self) -> int:
        return int(to_float(self._last.get("step")) or 0)

    @property
    def ended(self) -> bool:
        return self._total is not None and self.step >= self._total

    @property
    def has_rewards(self) -> bool:
        """True for a GRPO run."""
        return to_float(self._last.get("rewards_mean")) is not None

    def row(self) -> list[Text]:
        """Return a cell for each of COLUMNS."""
        steps = f"{self.step:,}" + (f"/{self._total:,}" if self._total else "")
        checks = metric_points(self._read(EVALUATIONS_FILE), "validation_loss")
        cells = [
            self.name,
            steps,
            self._format("loss", "{:.4f}"),
            sparkline([loss for _, loss in metric_points(self._steps, "loss")]),
            self._format("rewards_mean", "{:.4f}"),
            f"{checks[-1][1]:.4f}" if len(checks) else "–",
            self._format("lr", "{:.2e}"),
            format_si(speed) if (speed := to_float(self._last.get("tokens_per_second_per_device"))) else "–",
            self._format("mfu", "{:.1%}"),
            self._format("max_memory_gb", "{:.1f}"),
            self._remaining(),
        ]
        return [*map(Text, cells), self._age()]

    def events(self) -> list[Text]:
        """Return the newest events, one per line."""
        events = self._newest_events()
        return [
            Text(printable(f"{self.name}, {e.get('time')}: {e.get('text')}"), style="yellow") for e in events
        ]

    def document(self) -> dict[str, Any]:
        """Return the run's state as JSON values."""
        try:
            seconds = round(self._seconds_since_write(), 1)
        except OSError:
            seconds = None
        state = {"run": self.name, "step": self.step, "steps": self._total, "last": self._last}
        return state | {"seconds_since_write": seconds, "events": self._newest_events()}

    def _newest_events(self) -> list[Record]:
        return self._read(EVENTS_FILE)[-MAX_EVENTS:]

    def _seconds_since_write(self) -> float:
        written = modified(self._folder / METRICS_FILE)
        return (datetime.now(written.tzinfo) - written).total_seconds()

    def _format(self, key: str, form: str) -> str:
        value = to_float(self._last.get(key))
        return "–" if value is None else form.format(value)

    def _step_seconds(self) -> float:
        times = [ms for _, ms in metric_points(self._steps[-ETA_STEPS:], "step_time_ms")]
        return sum(times) / len(times) / 1e3 if times else 0.0

    def _remaining(self) -> str:
        if self.ended:
            return "done"
        seconds = ((self._total or 0) - self.step) * self._step_seconds()
        return str(timedelta(seconds=round(seconds))) if 0 < seconds < 1e9 else "–"

    def _age(self) -> Text:
        """Return the time since the last write, red if it is overdue."""
        try:
            seconds = self._seconds_since_write()
        except OSError:
            return Text("not yet", style="dim")
        late = not self.ended and seconds > LATE_FACTOR * (1 + self._step_seconds())
        return Text(f"{timedelta(seconds=max(0, round(seconds)))} ago", style="bold red" if late else "dim")


def _parse_steps(value: str | None) -> int | None:
    return int(value) if value and value.isdecimal() and len(value) < 15 else None
