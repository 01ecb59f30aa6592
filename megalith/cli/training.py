"""`megalith train`, `sft`, `dpo`, `grpo` and `evaluate`: in one process, or by starting some."""

from __future__ import annotations

import argparse
import contextlib
import json
import os

import megalith
from megalith.cli.parser import Arguments, Parser, leaf
from megalith.launch.operators import placement

PROGRAMS = {
    "train": "train as a run file says; `megalith train --help` lists every setting",
    "sft": "fine-tune on conversations as a run file says; takes what `train` takes",
    "dpo": "train on preferences, chosen and rejected answers, as a run file says",
    "grpo": "train by GRPO on what the model samples, or on rollouts from files, as a run file says",
}
"""The commands that take a run file, with their help."""

TRAIN_USAGE = """usage: megalith train|sft|dpo|grpo [run.yaml] [--nproc N] [--section.key value …]

`sft` fine-tunes on conversations: it is `train` with sft.enabled.
Trains as the run file says, with the settings on the command line in place of the file's. torchrun works as well.
`dpo` trains on pairs of a chosen and a rejected answer, with dpo.enabled.
`grpo` trains by GRPO and its kin on completions of rl.prompts, or on files of rollouts (rl.rollouts); with --dry-run it
reads the prompts, calls the rewards once, says layout and memory, and ends.

processes:
  --nproc N                  start N processes on this machine, one a GPU
  --nnodes N                 of N machines, each of which runs the same command; MIN:MAX for as many as there are
  --max-restarts N           start again after a failure, up to N times, from the newest whole checkpoint
  --rdzv-endpoint HOST:PORT  rendezvous, on one of them (default with --nnodes: MASTER_ADDR:MASTER_PORT)
  --dry-run                  everything but the devices: settings, data, layout, memory; trains nothing
  --world-size N             with --dry-run: the job's processes (default: --nproc, or 1)
  --rdzv-id ID               the job's name there, the same on each (default: made of the command)
What Kubeflow's operators (PET_*, RANK and WORLD_SIZE of pods) and Slurm's srun say in the environment is read first.
"""


def train(arguments: list[str]) -> int:
    """`megalith train|sft|dpo|grpo [run.yaml] [--nproc N] [--section.key value …]`"""
    program, *arguments = arguments
    if program in ("sft", "dpo"):
        arguments = [*arguments, f"--{program}.enabled"]
    if program == "sft":  # `train` on conversations
        program = "train"
    if {"-h", "--help"} & set(arguments):
        from megalith.config.describe import help_text

        print(TRAIN_USAGE)
        print(help_text())
        return 0
    _say_that_it_starts(program, arguments)
    from megalith.config import RunConfig
    from megalith.config.run import begins_override

    launcher, arguments = _launcher_options().parse_known_args(arguments)
    place = placement(os.environ, launcher.nproc, launcher.nnodes)
    os.environ |= place.variables
    path = arguments[0] if arguments and not begins_override(arguments[0]) else None
    config = RunConfig.load(path, arguments[1 if path else 0 :])
    if launcher.dry_run:
        if program == "grpo":
            from megalith.cli.rollout_command import dry_run as rollout_dry_run

            return rollout_dry_run(config, place.nproc or 1)
        from megalith.training.dry_run import dry_run

        print(dry_run(config, launcher.world_size or place.nproc or 1))
        return 0
    if place.nproc is not None:
        from megalith.launch.launcher import launch
        from megalith.training.precheck import check_job

        one_machine = place.nnodes == "1"
        command, check_data = ["-m", "megalith.cli", program, *arguments], None
        if program == "grpo":
            from megalith.rl.grpo import check_grpo_data as check_data
            from megalith.rl.grpo import require_source

            require_source(config)
        return launch(
            place.nproc,
            command,
            nnodes=place.nnodes,
            max_restarts=launcher.max_restarts or place.max_restarts,
            rdzv_endpoint=launcher.rdzv_endpoint or (None if one_machine else place.endpoint),
            rdzv_id=launcher.rdzv_id,
            check=lambda world_sizes: check_job(config, world_sizes, place.nproc, one_machine, check_data),
        )
    from megalith.launch.stops import exit_code
    from megalith.training.trainer import train

    if program == "grpo":
        from megalith.rl.grpo import train_grpo as train
    if program == "dpo":
        from megalith.rl.dpo import train_dpo as train
    return exit_code(train(config).ended)


def _say_that_it_starts(program: str, arguments: list[str]) -> None:
    """A line on the first rank's screen: what is imported next takes seconds."""
    rank, ranks = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if rank == "0":
        who = f"rank 0 of {ranks}" if ranks != "1" else " ".join([program, *arguments[:1]])
        with contextlib.suppress(OSError):  # a screen that is gone is no reason not to train
            print(f"megalith {megalith.__version__}: {who}, loading PyTorch", flush=True)


def _launcher_options() -> Parser:
    parser = Parser("megalith train", add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc", type=int)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--nnodes")
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--rdzv-endpoint")
    parser.add_argument("--rdzv-id")
    return parser


def add_evaluate_command(commands: argparse._SubParsersAction) -> None:
    parser = leaf(commands, "evaluate", "the loss and perplexity of a checkpoint", run_evaluate)
    parser.description = (
        "The mean loss and perplexity of a checkpoint on the validation and the test data of its run, in one process "
        "or any layout: `--section.key value` changes its settings, as to `train`. Nothing is written."
    )
    parser.add_argument("checkpoint", help="a run's folder, or one of its steps")
    parser.add_argument("--nproc", type=int, help="start so many processes; torchrun works as well")
    parser.add_argument("--json", action="store_true", help="also print an object with the figures")
    parser.set_defaults(takes_settings=True)


def run_evaluate(args: Arguments) -> int:
    from megalith.bridge.load import config_of
    from megalith.checkpoint.open import open_existing
    from megalith.config import RunConfig
    from megalith.config.run import parse_overrides

    checkpoint = open_existing(args.checkpoint, None)
    tree = config_of(checkpoint).to_tree() | {"parallel": {}}
    for section, key, value in parse_overrides(args.settings):
        tree.setdefault(section, {})[key] = value
    tree["train"] |= {"skip_train": True, "rampup_batch_size": None, "step_batch_size_schedule": None}
    tree["checkpoint"] = {"load": args.checkpoint, "load_optim": False}
    config = RunConfig.from_tree(tree)
    if args.nproc is not None:
        from megalith.launch.launcher import launch
        from megalith.training.precheck import check_job

        json_too = ["--json"] if args.json else []
        return launch(
            args.nproc,
            ["-m", "megalith.cli", "evaluate", args.checkpoint, *json_too, *args.settings],
            check=lambda world_sizes: check_job(config, world_sizes, args.nproc, True),
        )
    from megalith.launch.stops import exit_code
    from megalith.report.metrics import finite, perplexity
    from megalith.training.trainer import train

    if config.dpo.enabled:
        from megalith.rl.dpo import train_dpo as train
    result = train(config)
    if args.json and os.environ.get("RANK", "0") == "0":
        losses = {"validation": result.validation_loss, "test": result.test_loss}
        known = {name: loss for name, loss in losses.items() if loss is not None}
        figures = {f"{name}_loss": finite(loss) for name, loss in known.items()}
        figures |= {f"{name}_perplexity": finite(perplexity(loss)) for name, loss in known.items()}
        print(json.dumps({"step": result.step, **figures}))
    return exit_code(result.ended)
