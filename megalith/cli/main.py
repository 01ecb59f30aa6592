"""The command line: one short function a subcommand. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import megalith
from megalith.cli.parser import Arguments, Parser, group, leaf
from megalith.cli.planning import plan
from megalith.cli.training import PROGRAMS, train
from megalith.errors import ConfigError, DataError, MegalithError, printable
from megalith.launch.parent import exit_with_launcher
from megalith.remote import is_url
from megalith.report.streams import guard_standard_streams

LONGEST_INTERVAL = 86_400  # seconds between two looks of `megalith watch`

EXIT_CODES = """exit codes:
  0 done   1 unexpected error   2 configuration   3 data   4 checkpoint   5 training   6 a rank hangs
  stopped, with a checkpoint unless checkpoint.save_when_stopped says otherwise:
           20 exit_interval   21 exit_duration_in_mins   22 SIGTERM   23 SIGUSR1   24 SIGINT   25 SIGHUP
  without one: 143 SIGTERM, 130 SIGINT, where a second one came; 137 SIGKILL, as where host memory runs out"""


class ShowVersion(argparse.Action):
    """Prints the versions that a report of a fault should name."""

    def __call__(self, parser: argparse.ArgumentParser, *ignored: Any) -> None:
        from importlib.metadata import version

        python = sys.version.partition(" ")[0]
        print(f"megalith {megalith.__version__}, torch {version('torch')}, Python {python}")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand. A MegalithError is printed as its sentence, without a traceback."""
    exit_with_launcher()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    own = {
        **dict.fromkeys(PROGRAMS, train),
        **dict.fromkeys((*MEGATRON_PROGRAMS, "megatron"), megatron),
        "plan": plan,
        "accelerate": accelerate,
        "oumi": oumi,
        "bench": bench,
    }  # they read their own options
    if not arguments or arguments[0] not in own:
        return _told(lambda: _run_subcommand(arguments))
    if arguments[0] == "plan":  # its answer ends with who reads it
        return _told(lambda: plan(arguments))
    with guard_standard_streams():
        return _told(lambda: own[arguments[0]](arguments))


def _run_subcommand(arguments: list[str]) -> int:
    parsed, more = build_parser().parse_known_args(arguments)
    if parsed.takes_settings:
        parsed.settings = more
    elif more:
        parsed.parser.refuse(more)
    return parsed.run(parsed)


def _told(run: Callable[[], int]) -> int:
    """The exit code of `run`, whose errors are printed."""
    try:
        return run()
    except MegalithError as error:
        from megalith.launch.failure import report

        return report(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        return 1


MEGATRON_PROGRAMS = ("pretrain-gpt", "pretrain-bert", "pretrain-t5")


def megatron(words: list[str]) -> int:
    """`megalith pretrain-gpt FLAGS`, `megalith megatron run|install|flags …`"""
    from megalith.dialects.megatron import door

    if words[0] == "megatron":
        words = words[1:]
        if not words or words[0] in ("-h", "--help"):
            print(door.__doc__)
            return 0
    return door.run_command(words)


def accelerate(words: list[str]) -> int:
    """`megalith accelerate launch|config|enable|disable …`"""
    from megalith.dialects.accelerate.launch_door import run_command

    return run_command(words[1:])


def oumi(words: list[str]) -> int:
    """`megalith oumi train|distributed|plan|migrate …`"""
    from megalith.dialects.oumi.oumi_command import run_command

    return run_command(words[1:])


def bench(words: list[str]) -> int:
    """`megalith bench WORKLOAD|NAME …`"""
    from megalith.bench.bench_command import run_command

    return run_command(words[1:])


def build_parser() -> argparse.ArgumentParser:
    """Every subcommand with its options. Those that read their own, like `train`, are listed here alone."""
    from megalith.cli import clusters, conversion, datasets, generation, training
    from megalith.cli.conversion import add_checkpoint_commands
    from megalith.cli.planning import add_pipeline_show
    from megalith.cli.rollout_command import add_rollout_command
    from megalith.cli.training import add_parity_arguments

    parser = Parser(
        prog="megalith",
        description="Trains large transformers on any number of devices.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="print the version")
    commands = parser.add_subparsers(required=True, metavar="command")
    for program, text in PROGRAMS.items():
        commands.add_parser(program, help=text)
    commands.add_parser("pretrain-gpt", help="train by Megatron-LM's flags")
    commands.add_parser("pretrain-bert", help="train an encoder by Megatron-LM's flags")
    commands.add_parser("pretrain-t5", help="train an encoder-decoder by Megatron-LM's flags")
    commands.add_parser(
        "megatron", help="run Megatron-LM's scripts, install its programs' names, list its flags"
    )
    commands.add_parser("plan", help="layouts, memory, time and cost of a job, without its devices")
    commands.add_parser("accelerate", help="run Accelerate's scripts on Megalith, and configure its launcher")
    commands.add_parser("oumi", help="train by Oumi's configurations, and migrate them")
    commands.add_parser("bench", help="how fast this machine trains, generates, saves and reads")
    datasets.add_dataset_commands(commands)
    conversion.add_conversion_commands(commands)
    pipeline = group(commands, "pipeline", "look at pipeline schedules")
    add_pipeline_show(pipeline.add_parser("show", help="draw the timeline of a schedule, with its bubble"))
    add_parity_arguments(
        commands.add_parser("parity", help="compare a small run in many layouts with one process")
    )
    generation.add_generate_command(commands)
    add_rollout_command(commands)
    training.add_evaluate_command(commands)
    add_checkpoint_commands(group(commands, "checkpoint", "look at checkpoints, and rewrite them"))
    clusters.add_cluster_commands(commands)
    _add_runs(commands)
    _add_config(group(commands, "config", "describe the configuration"))
    return parser


def _add_runs(commands: argparse._SubParsersAction) -> None:
    plotter = leaf(commands, "plot", "draw the curves of one or several runs", plot)
    plotter.add_argument("run_dir", nargs="+", help="output folders of runs")
    plotter.add_argument("--output", help="PNG file (default: loss.png in the first run's folder)")
    plotter.add_argument("--text", action="store_true", help="draw the loss in the terminal instead")
    watcher = leaf(commands, "watch", "follow one or several runs in the terminal", watch)
    watcher.add_argument("run_dir", nargs="+", help="output folders of runs, also in a store (s3://…)")
    watcher.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks")
    watcher.add_argument("--once", action="store_true", help="look once and end")
    reporter = leaf(commands, "report", "all that runs wrote of themselves on one HTML page", report)
    reporter.description = (
        "Curves, memory, a step's times by rank, the pipeline, experts, FP8, completions, settings and their "
        "differences, machine and events of one or several runs: one HTML file, which needs no network."
    )
    reporter.add_argument("run_dir", nargs="+", help="output folders of runs, also in a store (s3://…)")
    reporter.add_argument("--output", help="HTML file (default: report.html in the first run's folder)")


def _add_config(config: argparse._SubParsersAction) -> None:
    leaf(config, "schema", "print the JSON Schema of run files, for editors", config_schema)
    leaf(config, "reference", "print the reference page of all settings", config_reference)
    leaf(config, "presets", "list the published model shapes", config_presets)


def plot(args: Arguments) -> int:
    from megalith.report.plot import loss_points, plot_run
    from megalith.report.text_curve import text_curve

    if args.text:
        for run in args.run_dir:
            print(*([run] if len(args.run_dir) > 1 else []), text_curve(loss_points(run)), sep="\n")
        return 0
    output = args.output or Path(args.run_dir[0]) / "loss.png"
    return _written(output, lambda: plot_run(args.run_dir, output))


def report(args: Arguments) -> int:
    from megalith.report.page import write_report

    first = args.run_dir[0]
    output = args.output or (Path() if is_url(first) else Path(first)) / "report.html"
    return _written(output, lambda: write_report(args.run_dir, output))


def watch(args: Arguments) -> int:
    from rich.console import Console

    from megalith.report.watch import watch

    if not 0.1 <= args.interval <= LONGEST_INTERVAL:
        raise ConfigError(
            f"--interval {args.interval:g} is not between 0.1 and {LONGEST_INTERVAL:,} seconds; give one that is"
        )
    watch(args.run_dir, Console(), args.interval, args.once or not sys.stdout.isatty())
    return 0


def _written(output: str | Path, write: Callable[[], Path]) -> int:
    if is_url(output):
        raise ConfigError(
            f"--output {output} is in a store, and pages and pictures are written on this machine alone; name a file "
            "here and copy it there"
        )
    try:
        print(printable(write()))
    except OSError as error:
        raise DataError(f"{output} cannot be written: {error.strerror}; choose another --output") from None
    return 0


def config_schema(args: Arguments) -> int:
    from megalith.config.describe import json_schema

    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    return 0


def config_reference(args: Arguments) -> int:
    from megalith.config.describe import reference_page

    print(reference_page(), end="")
    return 0


def config_presets(args: Arguments) -> int:
    from megalith.config.presets import PRESETS

    rows = [PRESET_COLUMNS, *(_preset_row(name) for name in PRESETS)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for name, *cells in rows:
        print(name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:])), sep="  ")
    return 0


PRESET_COLUMNS = ("preset", "parameters", "active", "layers", "hidden", "heads", "KV", "MLP", "experts",
                  "vocabulary", "positions")  # fmt: skip


def _preset_row(name: str) -> tuple[str, ...]:
    from megalith.config import RunConfig
    from megalith.planner.counts import count_parameters
    from megalith.tables import format_si

    model = RunConfig.from_tree({"model": {"preset": name}}).model
    given = {
        "vocab_size": model.vocab_size or 0,
        "max_position_embeddings": model.max_position_embeddings or 0,
    }
    counts = count_parameters(model.model_copy(update=given), padded_vocab=False)
    experts = f"{model.num_experts} × {model.expert_size}, {model.moe_router_topk} a token"
    sizes = (
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
        *map(str, sizes),
        experts if model.num_experts else "",
        f"{model.vocab_size:,}" if model.vocab_size else "tokenizer's",
        f"{model.max_position_embeddings:,}" if model.max_position_embeddings else "seq_length",
    )
