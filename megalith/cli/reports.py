"""`megalith plot`, `watch` and `report`, and `megalith config …`."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalith.cli.json_output import add_json_option, print_json
from megalith.cli.parser import Arguments
from megalith.errors import ConfigError, DataError, printable
from megalith.remote import is_url

if TYPE_CHECKING:
    from megalith.config import ModelConfig
    from megalith.planner.counts import ParameterCounts

MAX_INTERVAL = 86_400  # seconds between updates of `megalith watch`


def add_plot_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", nargs="+", help="output folders of runs")
    parser.add_argument("--output", help="PNG file (default: loss.png in the first run's folder)")
    parser.add_argument("--text", action="store_true", help="draw the loss in the terminal instead")
    add_json_option(parser, "path; with --text a list: run, losses ([step, loss] of each)")


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", nargs="+", help="output folders of runs, also in a store (s3://…)")
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="time between updates")
    parser.add_argument("--once", action="store_true", help="print the current state and exit")
    add_json_option(
        parser,
        "run, step, steps, last (newest metrics), seconds_since_write, events; implies --once",
        "list",
    )


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write an HTML report of one or several runs: curves, memory, step times by rank, pipeline, experts, FP8, "
        "completions, settings and their differences, machine and events. The file needs no network."
    )
    parser.add_argument("run_dir", nargs="+", help="output folders of runs, also in a store (s3://…)")
    parser.add_argument("--output", help="HTML file (default: report.html in the first run's folder)")
    add_json_option(parser, "path")


def add_presets_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_option(
        parser,
        "preset, parameters and active_parameters (null without a vocabulary), model (settings)",
        "list",
    )


def run_plot(args: Arguments) -> int:
    from megalith.report.plot import plot_run
    from megalith.report.run_files import open_runs
    from megalith.report.text_curve import text_curve

    if args.text:
        curves = {run: open_runs([run])[0].curve("loss") for run in args.run_dir}
        if args.json:
            print_json([{"run": run, "losses": losses.tolist()} for run, losses in curves.items()])
            return 0
        for run, losses in curves.items():
            print(*([run] if len(args.run_dir) > 1 else []), text_curve(losses.tolist()), sep="\n")
        return 0
    output = args.output or Path(args.run_dir[0]) / "loss.png"
    return _write(args, output, lambda: plot_run(args.run_dir, output))


def run_report(args: Arguments) -> int:
    from megalith.report.page import write_report

    first = args.run_dir[0]
    output = args.output or (Path() if is_url(first) else Path(first)) / "report.html"
    return _write(args, output, lambda: write_report(args.run_dir, output))


def run_watch(args: Arguments) -> int:
    from rich.console import Console

    from megalith.report.watch import snapshots, watch

    if not 0.1 <= args.interval <= MAX_INTERVAL:
        raise ConfigError(
            f"--interval is {args.interval:g}, but it must be between 0.1 and {MAX_INTERVAL:,} seconds"
        )
    if args.json:
        print_json(snapshots(args.run_dir))
        return 0
    watch(args.run_dir, Console(), args.interval, args.once or not sys.stdout.isatty())
    return 0


def _write(args: Arguments, output: str | Path, write: Callable[[], Path]) -> int:
    if is_url(output):
        raise ConfigError(
            f"--output {output} is in an object store, but reports and images are written to local files "
            "only; pass a local file, and copy it to the store afterwards"
        )
    try:
        with _without_garbage_collection():
            path = write()
            if args.json:
                print_json({"path": str(path)})
            else:
                print(printable(path))
    except OSError as error:
        raise DataError(f"{output} cannot be written: {error.strerror}; choose another --output") from None
    return 0


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector in this context, because it would traverse a long run's records again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def config_schema(args: Arguments) -> int:
    from megalith.config.describe import schema_text

    print(schema_text(), end="")
    return 0


def config_reference(args: Arguments) -> int:
    from megalith.config.describe import reference_page

    print(reference_page(), end="")
    return 0


def config_presets(args: Arguments) -> int:
    from megalith.config.presets import PRESETS

    if args.json:
        print_json([_preset_document(name) for name in PRESETS])
        return 0
    from megalith.tables import print_columns

    rows = [PRESET_COLUMNS, *(_preset_row(name) for name in PRESETS)]
    print_columns(rows)
    return 0


PRESET_COLUMNS = ("preset", "parameters", "active", "layers", "hidden", "heads", "KV", "MLP", "experts",
                  "vocabulary", "positions")  # fmt: skip


def _preset_counts(name: str) -> tuple[ModelConfig, ParameterCounts]:
    from megalith.config import RunConfig
    from megalith.planner.counts import count_parameters

    model = RunConfig.from_tree({"model": {"preset": name}}).model
    sizes = {
        "vocab_size": model.vocab_size or 0,
        "max_position_embeddings": model.max_position_embeddings or 0,
    }
    return model, count_parameters(model.model_copy(update=sizes), padded_vocab=False)


def _preset_document(name: str) -> dict[str, Any]:
    model, counts = _preset_counts(name)
    sizes = (counts.total, counts.active) if model.vocab_size else (None, None)
    settings = model.model_dump(mode="json", exclude_defaults=True)
    return {"preset": name, "parameters": sizes[0], "active_parameters": sizes[1], "model": settings}


def _preset_row(name: str) -> tuple[str, ...]:
    from megalith.tables import format_si

    model, counts = _preset_counts(name)
    experts = f"{model.num_experts} × {model.expert_size}, {model.moe_router_topk} per token"
    dimensions = (
        model.num_layers,
        model.hidden_size,
        model.num_attention_heads,
        model.query_groups,
        model.ffn_size,
    )
    return (
        name,
        format_si(counts.total) + ("" if model.vocab_size else " + vocabulary"),
        format_si(counts.active) if counts.idle else "",
        *map(str, dimensions),
        experts if model.num_experts else "",
        f"{model.vocab_size:,}" if model.vocab_size else "tokenizer's",
        f"{model.max_position_embeddings:,}" if model.max_position_embeddings else "seq_length",
    )
