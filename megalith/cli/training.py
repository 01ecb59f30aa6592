"""`megalith train` and the commands of post-training, in one or several processes; options of `evaluate` and `parity`.

Importing this file is cheap.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import TYPE_CHECKING, Any

import megalith
from megalith.cli.json_output import add_json_option, print_json, text_on_stderr
from megalith.cli.parser import Parser, option_strings
from megalith.errors import ConfigError
from megalith.launch.scheduler_env import read_launch_settings

if TYPE_CHECKING:
    from megalith.config import RunConfig
    from megalith.training.trainer import TrainingResult


TRAIN_USAGE = """usage: megalith COMMAND [run.yaml] [--nproc N] [--section.key …]

Settings on the command line override those of the run file. torchrun works too.

commands:
  train           train a model
  sft             fine-tune on conversations (`train` with sft.enabled)
  dpo             train on pairs of a chosen and a rejected answer (`train` with dpo.enabled)
  kto             train on answers marked as desirable or not (`train` with kto.enabled)
  reward          train a reward model on pairs or scored answers (`train` with reward.enabled)
  distill         train on the predictions of distill.teacher; with sft.enabled, on conversations
  teacher-logits  store these predictions in distill.logits_dir, for `distill`
  grpo            train with rewards on completions of rl.prompts, or on rollout files (rl.rollouts)

processes:
  --nproc N                  start N processes on this node, one per GPU
  --nnodes N                 number of nodes; run the same command on each. MIN:MAX: elastic
  --rdzv-endpoint HOST:PORT  rendezvous on one of the nodes (default with --nnodes: MASTER_ADDR:MASTER_PORT)
  --rdzv-id ID               name of the job, the same on all nodes (default: derived from the command)
  --max-restarts N           after a failure, restart up to N times from the newest complete checkpoint
  --spares N                 with checkpoint.memory_interval: keep N processes ready to replace ranks that fail
Environment variables of Kubeflow's operators (PET_*, RANK and WORLD_SIZE of pods) and of Slurm's srun are read first.

dry run:
  --dry-run                  check settings, data, layout and memory without training; grpo also reads the prompts and
                             calls the rewards once
  --world-size N             number of processes of the job (default: --nproc, or 1)
  --device NAME              check memory and choose `auto` settings for this GPU, named as in `plan`
  --device-json FILE         use the calibration file written by `plan calibrate`

output:
  --json                     print one JSON object at the end (step, consumed_samples, loss, validation_loss, test_loss,
                             checkpoint, ended, output_dir), and everything else on standard error
  --help WORD                help of a section (--help optim), or of the settings with WORD in their name or help
"""


def train(arguments: list[str]) -> int:
    """Run `megalith COMMAND [run.yaml] [--nproc N] [--section.key value …]`, for the commands of TRAIN_USAGE."""
    program, *arguments = arguments
    typed = program
    arguments = [*arguments, *implied_settings(program)]
    if program == "sft":  # `train` with sft.enabled
        program = "train"
    if {"-h", "--help"} & set(arguments):
        from megalith.config.describe import help_text

        word = _help_topic(arguments)
        print(help_text(word) if word else f"{TRAIN_USAGE}\n{help_text()}")
        return 0
    if arguments == implied_settings(typed):
        raise ConfigError(
            f"`megalith {typed}` needs a run file (such as examples/quickstart.yaml) or settings "
            "(such as --model.preset gpt2); `megalith train --help` lists the settings"
        )
    launcher, arguments = _launcher_options().parse_known_args(arguments)
    with text_on_stderr(launcher.json):
        _print_start(typed, arguments)
    from megalith.config import RunConfig
    from megalith.config.run import begins_override

    settings = read_launch_settings(os.environ, launcher.nproc, launcher.nnodes)
    os.environ |= settings.variables
    path = arguments[0] if arguments and not begins_override(arguments[0]) else None
    config = RunConfig.load(path, arguments[1 if path else 0 :])
    _check_dry_run(program, launcher)
    if launcher.dry_run:
        check_source(program, config)
        if program == "grpo":
            from megalith.cli.rollout_command import dry_run as rollout_dry_run

            return rollout_dry_run(config, launcher.world_size or settings.nproc or 1)
        from megalith.planner.rates import rates_of
        from megalith.training.precheck import dry_run

        named = launcher.device is not None or launcher.device_json is not None
        rates = rates_of(launcher.device, launcher.device_json) if named else None
        print(dry_run(config, launcher.world_size or settings.nproc or 1, rates))
        return 0
    if settings.nproc is not None:
        from megalith.launch.launcher import launch
        from megalith.training.precheck import check_job

        one_machine = settings.nnodes == "1"
        as_json = ["--json"] if launcher.json else []
        command, check_data = ["-m", "megalith", program, *arguments, *as_json], None
        check_source(program, config)
        if program == "grpo":
            from megalith.rl.grpo import check_grpo_data as check_data
        return launch(
            settings.nproc,
            command,
            nnodes=settings.nnodes,
            max_restarts=launcher.max_restarts or settings.max_restarts,
            rdzv_endpoint=launcher.rdzv_endpoint or (None if one_machine else settings.endpoint),
            rdzv_id=launcher.rdzv_id,
            spares=launcher.spares if config.checkpoint.memory_interval else 0,
            check=lambda world_sizes: check_job(config, world_sizes, settings.nproc, one_machine, check_data),
        )
    from megalith.launch.stops import exit_code
    from megalith.training.training_job import train

    if program == "grpo":
        from megalith.rl.grpo import train_grpo as train
    if program == "dpo":
        from megalith.rl.dpo import train_dpo as train
    if program == "kto":
        from megalith.rl.kto import train_kto as train
    if program == "reward":
        from megalith.rl.reward_model import train_reward as train
    if program == "distill":
        from megalith.rl.distill import train_distilled as train
    if program == "teacher-logits":
        from megalith.rl.distill import store_logits

        with text_on_stderr(launcher.json):
            store_logits(config)
        if launcher.json:
            print_json({"path": config.distill.logits_dir})
        return 0
    with text_on_stderr(launcher.json):
        result = train(config)
    if launcher.json and os.environ.get("RANK", "0") == "0":
        print_json(_result_document(result, config))
    return exit_code(result.ended)


def _result_document(result: TrainingResult, config: RunConfig) -> dict[str, Any]:
    names = "step", "consumed_samples", "loss", "validation_loss", "test_loss", "checkpoint", "ended"
    return {name: getattr(result, name) for name in names} | {"output_dir": config.train.output_dir}


def _help_topic(arguments: list[str]) -> str | None:
    """Return the argument after --help, which selects settings. None if there is none or it is the run file."""
    after = arguments[min(arguments.index(word) for word in ("-h", "--help") if word in arguments) + 1 :]
    if not after or after[0].startswith("-") or after[0].endswith((".yaml", ".yml", ".json")):
        return None
    return after[0]


def _check_dry_run(program: str, launcher: argparse.Namespace) -> None:
    if launcher.world_size is not None and launcher.world_size < 1:
        raise ConfigError(f"--world-size is {launcher.world_size}, but must be at least 1")
    if launcher.json and launcher.dry_run:
        raise ConfigError(
            "--dry-run prints text; leave out --json, and see `megalith plan show --json` for memory and time"
        )
    for name in ("world_size", "device", "device_json"):
        if (value := getattr(launcher, name)) is not None and not launcher.dry_run:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value}, but only --dry-run uses it: add --dry-run, or use --nproc "
                "and --runtime.device for a run"
            )
    for name in ("device", "device_json"):
        if program == "grpo" and (value := getattr(launcher, name)) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value}, but the dry run of grpo uses this machine; leave the option "
                "out, and see `megalith plan show`"
            )


def implied_settings(program: str) -> list[str]:
    """Return the settings that a command implies."""
    return [f"--{program}.enabled"] if program in ("sft", "dpo", "kto", "reward") else []


def check_source(program: str, config: RunConfig) -> None:
    """Raise ConfigError if grpo has neither prompts nor rollouts, or distill has no teacher."""
    if program == "grpo":
        from megalith.rl.grpo import require_source

        require_source(config)
    if program == "distill":
        from megalith.rl.distill import require_teacher

        require_teacher(config)


def _print_start(program: str, arguments: list[str]) -> None:
    """Print on rank 0 that the command is starting, because the imports that follow take seconds."""
    rank, ranks = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if rank == "0":
        who = f"rank 0 of {ranks}" if ranks != "1" else " ".join([program, *arguments[:1]])
        with contextlib.suppress(OSError):  # a closed terminal must not stop training
            print(f"megalith {megalith.__version__}: {who}, loading PyTorch", flush=True)


def launcher_words() -> list[str]:
    """Return the options of `train` and of the post-training commands, without the settings of run files."""
    return [*option_strings(_launcher_options()), "--help"]


def _launcher_options() -> Parser:
    parser = Parser("megalith train", add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc", type=int)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--device")
    parser.add_argument("--device-json")
    parser.add_argument("--nnodes")
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--rdzv-endpoint")
    parser.add_argument("--rdzv-id")
    parser.add_argument("--json", action="store_true")
    return parser


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print the mean loss and perplexity of a checkpoint on its run's validation and test data, in any layout. "
        "`--section.key value` overrides settings, as in `train`. With --tasks, evaluate a checkpoint or a Hugging "
        "Face folder with lm-evaluation-harness instead; requests longer than data.seq_length are truncated. "
        "Nothing else is written."
    )
    add = parser.add_argument
    add("checkpoint", help="run folder or one of its step folders; with --tasks also a Hugging Face folder")
    add(
        "--tasks",
        metavar="NAME[,NAME]",
        help="tasks or groups of lm-evaluation-harness, or YAML task files",
    )
    add("--include-path", metavar="FOLDER", help="folder with your own task files")
    add("--num-fewshot", type=int, metavar="N", help="few-shot examples (default: the task's)")
    add("--limit", type=int, metavar="N", help="use only the first N documents per task")
    add("--apply-chat-template", action="store_true", help="format prompts with the chat template")
    add("--output", metavar="FILE", help="write the tasks' results as JSON")
    add("--nproc", type=int, help="start N processes; torchrun works too")
    add_json_option(
        parser,
        "step, validation_loss, validation_perplexity, test_loss, test_perplexity; with --tasks the results by task",
    )
    parser.set_defaults(takes_settings=True)


def add_parity_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a small model with the features of CONFIG in many layouts, in fp32, and compare each with one process: "
        "the first loss, every parameter's gradient, the norms and losses of all steps, evaluation and generation. "
        "Exits with code 5 if a layout differs. `--section.key value` overrides settings, as for `train`."
    )
    parser.add_argument("config", help="run file; a small model with the same features is trained")
    parser.add_argument(
        "--layouts",
        nargs="+",
        default=[],
        metavar="NAME",
        help="layouts, such as tp2-sp cp4-a2a (default: all that fit)",
    )
    parser.add_argument("--nproc-max", type=int, default=4, metavar="N", help="maximum number of processes")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="number of training steps")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: one GPU per process, without attention dropout",
    )
    add_json_option(
        parser,
        "layouts (layout, ranks, verdict, seconds, errors, failure), not_run (reason by layout), bound",
    )
    parser.set_defaults(takes_settings=True)
