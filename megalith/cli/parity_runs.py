"""The command line of parity: `megalith parity`. Importing this file is cheap."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megalith.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from megalith.parity.check import Result

PLAIN_WIDTH = 120


def add_parity_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a small model with the features of CONFIG in many layouts, in fp32, and compare each with one process: "
        "the first loss, every parameter's gradient, the norms and losses of all steps, evaluation and generation. "
        "Exit code 5 when a layout differs. Settings can be given beside CONFIG, as to `train`: --section.key value."
    )
    parser.add_argument("config", help="run file; it is shrunk, with its features")
    parser.add_argument(
        "--layouts",
        nargs="+",
        default=[],
        metavar="NAME",
        help="which (default: all that fit), like tp2-sp cp4-a2a",
    )
    parser.add_argument("--nproc-max", type=int, default=4, metavar="N", help="most processes")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="steps of training")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: a GPU a process, and no attention dropout",
    )
    parser.set_defaults(run=run_parity, takes_settings=True)


def run_parity(args: argparse.Namespace) -> int:
    from rich.console import Console

    from megalith.bridge.load import with_init_from
    from megalith.config import RunConfig
    from megalith.config.rules.model_rules import check_model
    from megalith.config.small import VOCABULARY
    from megalith.parity.check import check, choose, shrink

    if args.nproc_max < 2 or args.steps < 2:
        raise ConfigError(
            f"--nproc-max is {args.nproc_max} and --steps {args.steps}; each has to be at least 2"
        )
    given = with_init_from(RunConfig.load(args.config, args.settings))
    check_model(given.model.model_copy(update={"vocab_size": given.model.vocab_size or VOCABULARY}))
    config = shrink(given, args.steps, args.device)
    layouts, refused = choose(config, args.layouts, _most_processes(args))
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    results: list[Result] = []
    with console.status("one process") as status:
        for number, result in enumerate(check(config, layouts, args.device), 1):
            results.append(result)
            status.update(f"{number} of {len(layouts)} layouts done")
            if not sys.stdout.isatty():
                print(
                    f"{result.name}: {_verdict(result)}, {result.seconds:.1f} s", file=sys.stderr, flush=True
                )
    console.print(table(results))
    for name, why in refused.items():
        print(f"not run: {name}: {why}")
    return _conclude(results)


def _most_processes(args: argparse.Namespace) -> int:
    if args.device == "cpu":
        return args.nproc_max
    import torch

    gpus = torch.cuda.device_count()
    if gpus < 2:
        raise ConfigError(f"--device cuda gives each process a GPU, but there are {gpus}; use --device cpu")
    return min(args.nproc_max, gpus)


def table(results: Sequence[Result]):
    """The errors, a row a layout."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

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


def _verdict(result: Result) -> str:
    if result.equal:
        return "equal"
    return "failed" if result.errors is None else "differs"


def _why(result: Result) -> str:
    if result.errors is None:
        return result.failure
    return "; ".join([f"worst gradient {result.errors.worst_gradient}", *result.errors.different])


def _conclude(results: Sequence[Result]) -> int:
    from megalith.parity.differences import BOUND

    unequal = [result for result in results if not result.equal]
    for result in unequal:
        print(f"{result.name} {_verdict(result)}: {_why(result)}")
    if unequal:
        raise TrainingError(
            f"{len(unequal)} of {len(results)} layouts are not one process's run to {BOUND:g}: "
            f"{', '.join(result.name for result in unequal)}; train in another layout, and report it with this "
            "configuration"
        )
    print(f"{len(results)} layouts equal one process to {BOUND:g}")
    return 0
