"""`megalith evaluate`: the loss of a checkpoint, or its results on tasks of lm-evaluation-harness."""

from __future__ import annotations

import json
import os
from pathlib import Path

from megalith.bridge.folder import is_model_folder
from megalith.bridge.load import config_of, model_of
from megalith.bridge.origin import saved_tokenizer, tokenizer_of
from megalith.checkpoint.open import open_existing
from megalith.cli.json_output import print_json, text_on_stderr
from megalith.cli.parser import Arguments
from megalith.config import RunConfig
from megalith.config.run import parse_overrides
from megalith.errors import ConfigError, install_line
from megalith.io import atomic_file
from megalith.launch.launcher import launch, this_process
from megalith.launch.stops import exit_code
from megalith.report.metrics import finite, perplexity
from megalith.rl.dpo import train_dpo
from megalith.rl.kto import train_kto
from megalith.rl.reward_model import train_reward
from megalith.training.precheck import check_job
from megalith.training.training_job import train

TASK_OPTIONS = ("tasks", "include_path", "num_fewshot", "limit", "output")
LONGEST_REQUEST = 4096  # tokens: upper bound of the default data.seq_length


def run_evaluate(args: Arguments) -> int:
    if args.tasks:
        return run_tasks(args)
    options = [f"--{name.replace('_', '-')}" for name in TASK_OPTIONS if getattr(args, name) is not None]
    if options := [*options, *["--apply-chat-template"] * args.apply_chat_template]:
        raise ConfigError(f"{', '.join(options)} requires --tasks")
    checkpoint = open_existing(args.checkpoint, None, show_progress=this_process().is_first)
    tree = config_of(checkpoint).to_tree() | {"parallel": {}}
    stored_dataset = tree["data"].pop("dataset", None)  # code: a checkpoint must not choose what runs here
    overrides = parse_overrides(args.settings)
    named = {key for section, key, _ in overrides if section == "data"}
    if stored_dataset and not named & {"dataset", "data_path", "valid_data_path", "test_data_path", "mock"}:
        raise ConfigError(
            f"{args.checkpoint} was trained on data.dataset {stored_dataset[:200]!r}, which is a "
            "Python file, and code that a checkpoint names is not run; if you trust the file, "
            "pass it with --data.dataset"
        )
    for section, key, value in overrides:
        tree.setdefault(section, {})[key] = value
    tree["train"] |= {"skip_train": True, "rampup_batch_size": None, "step_batch_size_schedule": None}
    tree["checkpoint"] = {"load": args.checkpoint, "load_optim": False}
    config = RunConfig.from_tree(tree)
    if args.nproc is not None:
        json_too = ["--json"] if args.json else []
        return launch(
            args.nproc,
            ["-m", "megalith", "evaluate", args.checkpoint, *json_too, *args.settings],
            check=lambda world_sizes: check_job(config, world_sizes, args.nproc, True),
        )
    tuning = {"dpo": train_dpo, "kto": train_kto, "reward": train_reward}
    with text_on_stderr(args.json):
        result = tuning.get(config.chat.name if config.chat else "", train)(config)
    if args.json and os.environ.get("RANK", "0") == "0":
        losses = {"validation": result.validation_loss, "test": result.test_loss}
        losses = {name: loss for name, loss in losses.items() if loss is not None}
        figures = {f"{name}_loss": finite(loss) for name, loss in losses.items()}
        figures |= {f"{name}_perplexity": finite(perplexity(loss)) for name, loss in losses.items()}
        print_json({"step": result.step, **figures})
    return exit_code(result.ended)


def run_tasks(args: Arguments) -> int:
    for name, minimum in (("limit", 1), ("num_fewshot", 0)):
        if (value := getattr(args, name)) is not None and value < minimum:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}, but must be at least {minimum}")
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
        raise ConfigError(f"{args.checkpoint} has no tokenizer, which --tasks needs; pass --tokenizer-type")
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
    with text_on_stderr(args.json):
        result = run_harness_tasks(RunConfig.from_tree(tree), tokenizer, request)
    if process.is_first:
        from lm_eval.utils import make_table

        if not args.json:
            print(make_table(result))
        kept = {
            name: result[name] for name in ("results", "versions", "n-shot", "n-samples") if name in result
        }
        if args.output:
            with atomic_file(Path(args.output)) as file:
                file.write(json.dumps(kept, indent=1, default=str).encode())
        if args.json:
            print_json(kept["results"])
    return 0
