"""`megalith train`, `sft`, `dpo`, `distill`, `grpo`, `evaluate` and `parity`, in one or several processes.

Importing this file is cheap.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import megalith
from megalith.cli.parser import Arguments, Parser
from megalith.errors import ConfigError, TrainingError
from megalith.launch.scheduler_env import read_launch_settings

if TYPE_CHECKING:
    from megalith.config import RunConfig
    from megalith.parity.check import Result


TRAIN_USAGE = """usage: megalith train|sft|dpo|distill|teacher-logits|grpo [run.yaml] [--nproc N] [--section.key …]

Settings on the command line override those of the run file. torchrun works too.

commands:
  train           train a model
  sft             fine-tune on conversations (`train` with sft.enabled)
  dpo             train on pairs of a chosen and a rejected answer (`train` with dpo.enabled)
  distill         train on the predictions of distill.teacher; with sft.enabled, on conversations
  teacher-logits  store these predictions in distill.logits_dir, for `distill`
  grpo            train with rewards on completions of rl.prompts, or on rollout files (rl.rollouts)

processes:
  --nproc N                  start N processes on this node, one per GPU
  --nnodes N                 number of nodes; run the same command on each. MIN:MAX: elastic
  --rdzv-endpoint HOST:PORT  rendezvous on one of the nodes (default with --nnodes: MASTER_ADDR:MASTER_PORT)
  --rdzv-id ID               name of the job, the same on all nodes (default: derived from the command)
  --max-restarts N           after a failure, restart up to N times from the newest complete checkpoint
Environment variables of Kubeflow's operators (PET_*, RANK and WORLD_SIZE of pods) and of Slurm's srun are read first.

dry run:
  --dry-run                  check settings, data, layout and memory without training; grpo also reads the prompts and
                             calls the rewards once
  --world-size N             number of processes of the job (default: --nproc, or 1)
  --device NAME              check memory and choose `auto` settings for this GPU, named as in `plan`
  --device-json FILE         use the calibration file written by `plan calibrate`
"""


def train(arguments: list[str]) -> int:
    """Run `megalith train|sft|dpo|distill|teacher-logits|grpo [run.yaml] [--nproc N] [--section.key value …]`."""
    program, *arguments = arguments
    typed = program
    arguments = [*arguments, *implied_settings(program)]
    if program == "sft":  # `train` with sft.enabled
        program = "train"
    if {"-h", "--help"} & set(arguments):
        from megalith.config.describe import help_text

        print(TRAIN_USAGE)
        print(help_text())
        return 0
    if arguments == implied_settings(typed):
        raise ConfigError(
            f"`megalith {typed}` has neither a run file nor settings; give a run file (examples/quickstart.yaml is "
            "one), or settings such as --model.preset gpt2; `megalith train --help` lists them"
        )
    _say_that_it_starts(typed, arguments)
    from megalith.config import RunConfig
    from megalith.config.run import begins_override

    launcher, arguments = _launcher_options().parse_known_args(arguments)
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
        command, check_data = ["-m", "megalith", program, *arguments], None
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
            check=lambda world_sizes: check_job(config, world_sizes, settings.nproc, one_machine, check_data),
        )
    from megalith.launch.stops import exit_code
    from megalith.training.trainer import train

    if program == "grpo":
        from megalith.rl.grpo import train_grpo as train
    if program == "dpo":
        from megalith.rl.dpo import train_dpo as train
    if program == "distill":
        from megalith.rl.distill import train_distilled as train
    if program == "teacher-logits":
        from megalith.rl.distill import store_logits

        store_logits(config)
        return 0
    return exit_code(train(config).ended)


def _check_dry_run(program: str, launcher: argparse.Namespace) -> None:
    if launcher.world_size is not None and launcher.world_size < 1:
        raise ConfigError(f"--world-size is {launcher.world_size}; give 1 or more")
    for name in ("world_size", "device", "device_json"):
        if (value := getattr(launcher, name)) is not None and not launcher.dry_run:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value}, but only --dry-run uses it: add --dry-run, or use --nproc "
                "and --runtime.device for a run"
            )
    for name in ("device", "device_json"):
        if program == "grpo" and (value := getattr(launcher, name)) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value}, but the dry run of grpo uses this machine; omit it, and see "
                "`megalith plan show`"
            )


def implied_settings(program: str) -> list[str]:
    """Return the settings that a command implies."""
    return [f"--{program}.enabled"] if program in ("sft", "dpo") else []


def check_source(program: str, config: RunConfig) -> None:
    """Raise ConfigError if the run lacks the command's source: prompts or rollouts (grpo), a teacher (distill)."""
    if program == "grpo":
        from megalith.rl.grpo import require_source

        require_source(config)
    if program == "distill":
        from megalith.rl.distill import require_teacher

        require_teacher(config)


def _say_that_it_starts(program: str, arguments: list[str]) -> None:
    """Print a line on rank 0, because the imports that follow take seconds."""
    rank, ranks = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if rank == "0":
        who = f"rank 0 of {ranks}" if ranks != "1" else " ".join([program, *arguments[:1]])
        with contextlib.suppress(OSError):  # a closed terminal must not stop training
            print(f"megalith {megalith.__version__}: {who}, loading PyTorch", flush=True)


def _launcher_options() -> Parser:
    parser = Parser("megalith train", add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc", type=int)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--device")
    parser.add_argument("--device-json")
    parser.add_argument("--nnodes")
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--rdzv-endpoint")
    parser.add_argument("--rdzv-id")
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
    parser.add_argument("--json", action="store_true", help="also print the results as a JSON object")
    parser.set_defaults(takes_settings=True)


def run_evaluate(args: Arguments) -> int:
    if args.tasks:
        return run_tasks(args)
    options = [f"--{name.replace('_', '-')}" for name in TASK_OPTIONS if getattr(args, name) is not None]
    if options := [*options, *["--apply-chat-template"] * args.apply_chat_template]:
        raise ConfigError(f"{', '.join(options)} requires --tasks")
    from megalith.bridge.load import config_of
    from megalith.checkpoint.open import open_existing
    from megalith.config import RunConfig
    from megalith.config.run import parse_overrides
    from megalith.launch.launcher import this_process

    checkpoint = open_existing(args.checkpoint, None, show_progress=this_process().is_first)
    tree = config_of(checkpoint).to_tree() | {"parallel": {}}
    stored_dataset = tree["data"].pop("dataset", None)  # code: a checkpoint must not choose what runs here
    overrides = parse_overrides(args.settings)
    named = {key for section, key, _ in overrides if section == "data"}
    if stored_dataset and not named & {"dataset", "data_path", "valid_data_path", "test_data_path", "mock"}:
        raise ConfigError(
            f"{args.checkpoint} was trained on data.dataset {stored_dataset[:200]!r}, which is code, and a checkpoint "
            "does not choose the code that runs here; if you trust this file, name it with --data.dataset"
        )
    for section, key, value in overrides:
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
            ["-m", "megalith", "evaluate", args.checkpoint, *json_too, *args.settings],
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
        losses = {name: loss for name, loss in losses.items() if loss is not None}
        figures = {f"{name}_loss": finite(loss) for name, loss in losses.items()}
        figures |= {f"{name}_perplexity": finite(perplexity(loss)) for name, loss in losses.items()}
        print(json.dumps({"step": result.step, **figures}))
    return exit_code(result.ended)


TASK_OPTIONS = ("tasks", "include_path", "num_fewshot", "limit", "output")
LONGEST_REQUEST = 4096  # tokens: upper bound of the default data.seq_length


def run_tasks(args: Arguments) -> int:
    for name, minimum in (("limit", 1), ("num_fewshot", 0)):
        if (value := getattr(args, name)) is not None and value < minimum:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; give {minimum} or more")
    from megalith.bridge.folder import is_model_folder
    from megalith.bridge.load import config_of, model_of
    from megalith.bridge.origin import saved_tokenizer, tokenizer_of
    from megalith.checkpoint.open import open_existing
    from megalith.config import RunConfig
    from megalith.config.run import parse_overrides
    from megalith.errors import install_line
    from megalith.io import atomic_file
    from megalith.launch.launcher import launch, this_process

    if args.nproc is not None:
        values = [(f"--{name.replace('_', '-')}", getattr(args, name)) for name in TASK_OPTIONS]
        options = [f"{option}={value}" for option, value in values if value is not None]
        flags = [
            f"--{name}" for name in ("json", "apply-chat-template") if getattr(args, name.replace("-", "_"))
        ]
        return launch(
            args.nproc, ["-m", "megalith", "evaluate", args.checkpoint, *options, *flags, *args.settings]
        )
    process = this_process()
    if is_model_folder(args.checkpoint):
        tokenizer, precision = tokenizer_of(Path(args.checkpoint)), "fp32"
    else:
        checkpoint = open_existing(args.checkpoint, None, show_progress=process.is_first)
        tokenizer, precision = (
            saved_tokenizer(checkpoint.tokenizer_folder),
            config_of(checkpoint).train.precision,
        )
    if tokenizer is None:
        raise ConfigError(f"{args.checkpoint} carries no tokenizer, which --tasks needs")
    tree = {
        "model": {"init_from": args.checkpoint},
        "data": {
            "mock": True,
            "seq_length": min(model_of(args.checkpoint).max_position_embeddings, LONGEST_REQUEST),
        },
        "optim": {"lr": 1.0},
        "train": {"train_iters": 1, "precision": precision, "micro_batch_size": 1},
    }
    for section, key, value in parse_overrides(args.settings):
        tree.setdefault(section, {})[key] = value
    size = RunConfig.from_tree(tree).train.micro_batch_size
    tree["train"]["global_batch_size"] = size * process.world_size
    try:
        from megalith.training.task_harness import TaskRequest, run_harness_tasks
    except ImportError as error:
        raise ConfigError(
            f"--tasks needs lm-evaluation-harness, which is not installed ({error}); run: {install_line('evaluate')}"
        ) from error
    request = TaskRequest(
        args.tasks.split(","), args.num_fewshot, args.limit, args.include_path, args.apply_chat_template
    )
    result = run_harness_tasks(RunConfig.from_tree(tree), tokenizer, request)
    if process.is_first:
        from lm_eval.utils import make_table

        print(make_table(result))
        kept = {
            name: result[name] for name in ("results", "versions", "n-shot", "n-samples") if name in result
        }
        if args.output:
            with atomic_file(Path(args.output)) as file:
                file.write(json.dumps(kept, indent=1, default=str).encode())
        if args.json:
            print(json.dumps(kept["results"], default=str))
    return 0


PLAIN_WIDTH = 120


def add_parity_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a small model with the features of CONFIG in many layouts, in fp32, and compare each with one process: "
        "the first loss, every parameter's gradient, the norms and losses of all steps, evaluation and generation. "
        "Exits with code 5 if a layout differs. `--section.key value` overrides settings, as for `train`."
    )
    parser.add_argument("config", help="run file; its model is shrunk but keeps its features")
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
    parser.set_defaults(takes_settings=True)


def run_parity(args: argparse.Namespace) -> int:
    from rich.console import Console

    from megalith.bridge.load import with_init_from
    from megalith.config import RunConfig
    from megalith.config.rules.model_rules import check_model
    from megalith.parity.check import check, choose
    from megalith.parity.sizes import VOCAB_SIZE, shrink
    from megalith.progress import Progress

    if args.nproc_max < 2 or args.steps < 2:
        raise ConfigError(
            f"--nproc-max is {args.nproc_max} and --steps {args.steps}; each has to be at least 2"
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
    console.print(table(results))
    for name, reason in refused.items():
        print(f"not run: {name}: {reason}")
    return _conclude(results)


def _most_processes(args: argparse.Namespace) -> int:
    if args.device == "cpu":
        return args.nproc_max
    import torch

    gpus = torch.cuda.device_count()
    if gpus < 2:
        raise ConfigError(f"--device cuda needs at least 2 GPUs, but there are {gpus}; use --device cpu")
    return min(args.nproc_max, gpus)


def table(results: Sequence[Result]):
    """Return the table of errors, with a row per layout."""
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


def _explain(result: Result) -> str:
    if result.errors is None:
        return result.failure
    return "; ".join([f"worst gradient {result.errors.worst_gradient}", *result.errors.different])


def _conclude(results: Sequence[Result]) -> int:
    from megalith.parity.differences import BOUND

    unequal = [result for result in results if not result.equal]
    for result in unequal:
        print(f"{result.name} {_verdict(result)}: {_explain(result)}")
    if unequal:
        raise TrainingError(
            f"{len(unequal)} of {len(results)} layouts differ from one process by more than {BOUND:g}: "
            f"{', '.join(result.name for result in unequal)}; train in another layout, and report this with the "
            "configuration"
        )
    print(f"{len(results)} layouts equal one process to {BOUND:g}")
    return 0
