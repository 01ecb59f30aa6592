"""`megalith plot` and `report`: looking at what runs wrote. Importing this file is cheap."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from megalith.cli.parser import Arguments, leaf
from megalith.errors import DataError, printable
from megalith.remote import is_url

RUNS = "output folders of runs"


def add_run_commands(commands: argparse._SubParsersAction) -> None:
    plotter = leaf(commands, "plot", "draw the curves of one or several runs", plot)
    plotter.add_argument("run_dir", nargs="+", help=RUNS)
    plotter.add_argument("--output", help="PNG file (default: loss.png in the first run's folder)")
    plotter.add_argument("--text", action="store_true", help="draw the loss in the terminal instead")
    reporter = leaf(commands, "report", "all that runs wrote of themselves on one HTML page", report)
    reporter.description = (
        "Curves, memory, a step's times by rank, the pipeline, experts, FP8, completions, settings and their "
        "differences, machine and events of one or several runs: one HTML file, which needs no network."
    )
    reporter.add_argument("run_dir", nargs="+", help=f"{RUNS}, also in a store (s3://…)")
    reporter.add_argument("--output", help="HTML file (default: report.html in the first run's folder)")


def plot(args: Arguments) -> int:
    from megalith.report.plot import loss_points, plot_run, text_curve

    if args.text:
        for run in args.run_dir:
            print(*([run] if len(args.run_dir) > 1 else []), text_curve(loss_points(run)), sep="\n")
        return 0
    output = args.output or Path(args.run_dir[0]) / "loss.png"
    return _written(output, lambda: plot_run(args.run_dir, output))


def report(args: Arguments) -> int:
    from megalith.report.page.html_report import write_report

    first = args.run_dir[0]
    output = args.output or (Path() if is_url(first) else Path(first)) / "report.html"
    return _written(output, lambda: write_report(args.run_dir, output))


def _written(output: str | Path, write: Callable[[], Path]) -> int:
    try:
        print(printable(write()))
    except OSError as error:
        raise DataError(f"{output} cannot be written: {error.strerror}; choose another --output") from None
    return 0
