"""Entry point of the command line. Modules of commands are imported when they are needed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import megalith
from megalith.cli.commands import COMMANDS, GROUPS, load
from megalith.cli.parser import Parser
from megalith.errors import MegalithError
from megalith.launch.parent import exit_with_launcher
from megalith.report.streams import guard_standard_streams

EXIT_CODES = """exit codes:
  0 done   1 unexpected error   2 configuration   3 data   4 checkpoint   5 training   6 a rank hangs
  stopped early, with a checkpoint unless checkpoint.save_when_stopped prevents it:
           20 exit_interval   21 exit_duration_in_mins   22 SIGTERM   23 SIGUSR1   24 SIGINT   25 SIGHUP
  without a checkpoint: 143 second SIGTERM, 130 second SIGINT, 137 SIGKILL (such as when host memory runs out)"""


class ShowVersion(argparse.Action):
    """Print the versions that a bug report should include."""

    def __call__(self, parser: argparse.ArgumentParser, *ignored: Any) -> None:
        from importlib.metadata import version

        python = sys.version.partition(" ")[0]
        print(f"megalith {megalith.__version__}, torch {version('torch')}, Python {python}")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default that of sys.argv; return the exit code. A MegalithError is printed as its message."""
    exit_with_launcher()
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = COMMANDS.get(words[0]) if words else None
    if command is None or command.options is not None:
        return _exit_code(lambda: _parse_and_run(words))
    if words[0] == "plan":  # stops when the reader of its output does
        return _exit_code(lambda: load(command.run)(words))
    with guard_standard_streams():
        return _exit_code(lambda: load(command.run)(words))


def _parse_and_run(words: list[str]) -> int:
    args, more = build_parser(words).parse_known_args(words)
    if args.takes_settings:
        args.settings = more
    elif more:
        args.parser.refuse(more)
    return load(args.run)(args)


def _exit_code(run: Callable[[], int]) -> int:
    """Return the exit code of `run`, and print its errors."""
    try:
        return run()
    except MegalithError as error:
        from megalith.launch.failure import report

        return report(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output has exited
        sys.stderr.close()
        return 1


def build_parser(words: Sequence[str] | None = None) -> Parser:
    """Build the parser of all commands.

    Only the command that `words` start with gets its options. None means all commands.
    """
    parser = Parser(
        prog="megalith",
        description="Trains large transformers on any number of devices.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="print the version")
    commands = parser.add_subparsers(required=True, metavar="command")
    groups: dict[str, Any] = {}
    for name, command in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        if group and group not in groups:
            groups[group] = commands.add_parser(group, help=GROUPS[group]).add_subparsers(
                required=True, metavar="command"
            )
        subparser = (groups[group] if group else commands).add_parser(last, help=command.help)
        if command.options is None:
            continue
        subparser.set_defaults(run=command.run)
        if command.options and (words is None or name.split() == list(words[: len(name.split())])):
            load(command.options)(subparser)
    return parser
