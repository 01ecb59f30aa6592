"""`megalith parity`: compare a small run in many layouts with one process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megalith.bridge.load import with_init_from
from megalith.cli.json_output import print_json, text_on_stderr
from megalith.cli.parser import Arguments
from megalith.config import RunConfig
from megalith.config.rules.model_rules import check_model
from megalith.errors import ConfigError, TrainingError
from megalith.parity.check import Result, check, choose
from megalith.parity.differences import BOUND
from megalith.parity.sizes import VOCAB_SIZE, shrink
from megalith.progress import Progress

PLAIN_WIDTH = 120


def run_parity(args: Arguments) -> int:
    if args.nproc_max < 2 or args.steps < 2:
        raise ConfigError(
            f"--nproc-max is {args.nproc_max} and --steps is {args.steps}; both must be at least 2"
        )
    full_config = with_init_from(RunConfig.load(args.config, args.settings))
    vocab_size = full_config.model.vocab_size or VOCAB_SIZE
    check_model(full_config.model.model_copy(update={"vocab_size": vocab_size}))
    config = shrink(full_config, args.steps, args.device)
    layouts, refused = choose(config, args.layouts, _most_processes(args))
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    results: list[Result] = []
    with Progress("parity", len(layouts), "layouts") as progress:
        for result in check(config, layouts, args.device):
            results.append(result)
            progress.add()
            if not sys.stdout.isatty():
                print(
                    f"{result.name}: {_verdict(result)}, {result.seconds:.1f} s", file=sys.stderr, flush=True
                )
    if args.json:
        print_json({"layouts": list(map(_document, results)), "not_run": refused, "bound": BOUND})
    with text_on_stderr(args.json):
        console.print(table(results))
        for name, reason in refused.items():
            print(f"not run: {name}: {reason}")
        return _conclude(results)


def _most_processes(args: Arguments) -> int:
    if args.device == "cpu":
        return args.nproc_max
    gpus = torch.cuda.device_count()
    if gpus < 2:
        raise ConfigError(f"--device cuda needs at least 2 GPUs, but there are {gpus}; use --device cpu")
    return min(args.nproc_max, gpus)


def table(results: Sequence[Result]):
    """Return the table of errors, with a row per layout."""
    drawn = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    drawn.add_column("layout", overflow="fold")
    for heading in ("ranks", "1st loss", "gradients", "norms", "losses", "eval", "s"):
        drawn.add_column(heading, justify="right", no_wrap=True, min_width=max(len(heading), 4))
    drawn.add_column("", no_wrap=True, min_width=len("differs"))
    for result in results:
        errors, figures = result.errors, ["–"] * 5
        if errors is not None:
            values = (errors.loss, errors.gradient, errors.norm, errors.losses, errors.evaluation)
            figures = [f"{value:.1e}" for value in values]
        verdict = Text(_verdict(result), "green" if result.equal else "bold red")
        drawn.add_row(result.name, str(result.layout.processes), *figures, f"{result.seconds:.1f}", verdict)
    return drawn


def _document(result: Result) -> dict[str, object]:
    errors = None if result.errors is None else asdict(result.errors)
    head = {"layout": result.name, "ranks": result.layout.processes, "verdict": _verdict(result)}
    return head | {"seconds": result.seconds, "errors": errors, "failure": result.failure or None}


def _verdict(result: Result) -> str:
    if result.equal:
        return "equal"
    return "failed" if result.errors is None else "differs"


def _explain(result: Result) -> str:
    if result.errors is None:
        return result.failure
    return "; ".join([f"worst gradient {result.errors.worst_gradient}", *result.errors.different])


def _conclude(results: Sequence[Result]) -> int:
    unequal = [result for result in results if not result.equal]
    for result in unequal:
        print(f"{result.name} {_verdict(result)}: {_explain(result)}")
    if unequal:
        raise TrainingError(
            f"{len(unequal)} of {len(results)} layouts differ from the run on one process by more than {BOUND:g}: "
            f"{', '.join(result.name for result in unequal)}; train in another layout, and report this with the "
            "configuration"
        )
    equal = "1 layout agrees" if len(results) == 1 else f"{len(results)} layouts agree"
    print(f"{equal} with one process to {BOUND:g}")
    return 0
