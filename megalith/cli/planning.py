"""`megalith plan …`: layouts, memory, time and goodput of a job without its devices, and this machine's rates."""

from __future__ import annotations

from collections.abc import Callable

from megalith.cli.parser import Arguments, Parser
from megalith.errors import ConfigError


def run_calibrate(args: Arguments) -> int:
    if args.nproc is not None:
        from megalith.launch.launcher import launch

        command = ["-m", "megalith.cli", "plan", "calibrate", "--seconds", str(args.seconds)]
        return launch(args.nproc, [*command, *(["--output", args.output] if args.output else [])])
    from pathlib import Path

    from megalith.hardware import pick_device
    from megalith.io import write_file
    from megalith.launch.launcher import end_distributed, init_distributed, this_process
    from megalith.planner.calibrate import calibrate

    process = this_process()
    device = pick_device("auto", process.local_rank)
    init_distributed(device)
    table = calibrate(device, args.seconds).to_json()
    if process.is_first:
        if args.output:
            try:
                write_file(Path(args.output), table)
            except OSError as error:
                raise ConfigError(f"{args.output} cannot be written: {error.strerror}") from None
        print(args.output or table)
    end_distributed()
    return 0


def _calibrate_options(parser: Parser) -> None:
    parser.description = "Measure this machine's rates, in about three minutes, as a file for --device-json."
    parser.add_argument("--nproc", type=int, help="start so many processes, one a GPU: collectives are measured too")
    parser.add_argument("--output", help="the file; without it the table is printed")
    parser.add_argument("--seconds", type=float, default=120.0, help="about how long GEMMs and attention may take")


COMMANDS: dict[str, tuple[Callable[[Parser], None], Callable[[Arguments], int]]] = {
    "calibrate": (_calibrate_options, run_calibrate),
}


def plan(words: list[str]) -> int:
    """`megalith plan RUN|PRESET …`, and `megalith plan show|goodput|calibrate …`"""
    name = words[1] if len(words) > 1 and words[1] in COMMANDS else ""
    add_options, run = COMMANDS[name]
    parser = Parser(f"megalith plan {name}".rstrip(), allow_abbrev=False)
    add_options(parser)
    args, args.settings = parser.parse_known_args(words[2 if name else 1 :])
    return run(args)
