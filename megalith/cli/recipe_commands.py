"""`megalith recipes …`: planned run files. `megalith init`: a run file for this machine. Importing this
file is cheap.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megalith.cli.json_output import add_json_option, print_json, print_written
from megalith.cli.parser import Arguments
from megalith.errors import ConfigError, did_you_mean
from megalith.tables import print_columns

COLUMNS = "recipe", "GPUs", "GB per GPU", "tokens/s per GPU"
QUESTIONS = {
    "task": "What do you want to do",
    "model": "Which model (`megalith config presets` lists them)",
    "gpus": "How many GPUs",
    "data": "Which data",
    "output": "Where should the run file go",
}


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", help="only this task: pretrain, sft, lora, dpo, grpo or distill")
    parser.add_argument("--model", help="only models whose name contains this")
    parser.add_argument("--gpus", type=int, help="only recipes for at most this many GPUs")
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    _add_name(parser)
    add_json_option(parser, "name, those of `recipes list --json`, run_file (text)")


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="name of a recipe (`megalith recipes list`)")


def add_copy_arguments(parser: argparse.ArgumentParser) -> None:
    _add_name(parser)
    parser.add_argument("file", nargs="?", help="run file to write (default: NAME.yaml)")
    add_json_option(parser, "path")


def add_init_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a run file for a task, a model and the GPUs of this machine, with the layout that the planner expects "
        "to be fastest. Asks for what the options do not give."
    )
    parser.add_argument("--task", help="pretrain, sft, lora, dpo, grpo or distill")
    parser.add_argument("--model", help="a preset, such as qwen3-0.6b")
    parser.add_argument(
        "--weights", help="folder or hub name of the weights to start from (default: the preset's)"
    )
    parser.add_argument("--gpus", type=int, help="number of GPUs (default: those of this machine)")
    parser.add_argument(
        "--device", help="GPU name, such as H100 or A100-40GB (default: this machine's, or H100)"
    )
    parser.add_argument("--data", help="training data, or the prompts of grpo")
    parser.add_argument("--output", help="run file to write")
    add_json_option(parser, "path, task, model, gpus, device")


def run_list(args: Arguments) -> int:
    from megalith.recipes.plans import FILES, facts_of

    if args.task is not None:
        _task(args.task)
    rows = []
    for file in sorted(FILES.glob("*.yaml")):
        facts = {"name": file.stem} | facts_of(file.read_text(encoding="utf-8"))
        if args.task not in (None, facts["task"]) or (args.model or "") not in facts["model"]:
            continue
        if args.gpus is None or facts["gpus"] <= args.gpus:
            rows.append(facts)
    rows.sort(key=lambda facts: (facts["task"], facts["gpus"]))
    if args.json:
        print_json(rows)
        return 0
    if not rows:
        raise ConfigError(
            "no recipe matches that task, model and number of GPUs; `megalith recipes list` lists all of them"
        )
    print_columns([COLUMNS, *(_cells(facts) for facts in rows)])
    print(
        "planned for H100 of 80 GB; `megalith recipes copy NAME` writes a run file, `megalith init` plans your own"
    )
    return 0


def _cells(facts: dict[str, Any]) -> tuple[str, ...]:
    return facts["name"], str(facts["gpus"]), f"{facts['gb']:.1f}", f"{facts['tokens_per_second_per_gpu']:,}"


def run_show(args: Arguments) -> int:
    text = _text(args.name)
    if args.json:
        from megalith.recipes.plans import facts_of

        print_json({"name": args.name} | facts_of(text) | {"run_file": text})
    else:
        print(text, end="")
    return 0


def run_copy(args: Arguments) -> int:
    text, file = _text(args.name), Path(args.file or f"{args.name}.yaml")
    _write(file, text.replace(f" {args.name}.yaml", f" {file}"))
    print_written(args, file)
    if not args.json:
        lines = file.read_text(encoding="utf-8").splitlines()
        print(*(line[2:] for line in lines if line.startswith(("# Data: ", "# Start: "))), sep="\n")
    return 0


def _text(name: str) -> str:
    from megalith.recipes.plans import FILES

    names = [file.stem for file in FILES.glob("*.yaml")]
    if name not in names:
        raise ConfigError(
            f"unknown recipe {name!r}{did_you_mean(name, names)}; `megalith recipes list` lists all recipes"
        )
    return (FILES / f"{name}.yaml").read_text(encoding="utf-8")


def _write(file: Path, text: str) -> None:
    from megalith.io import write_file

    _free_file(str(file))
    try:
        write_file(file, text)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}; choose another file") from None


def run_init(args: Arguments) -> int:
    from megalith.recipes.catalogue import MODELS, TASKS, Recipe
    from megalith.recipes.plans import dump, heading, planned_tree, start_command

    task = _answer("task", args.task, lambda: "sft", _task, f" ({', '.join(TASKS)})")
    preset = _answer("model", args.model, lambda: "qwen3-0.6b", _preset)
    weights = args.weights or MODELS.get(preset)
    if weights is None:
        raise ConfigError(
            f"--weights is not set, and preset {preset} has no hub name; set --weights to the folder or hub name "
            "with its tokenizer" + ("" if task == "pretrain" else " and weights")
        )
    gpus = _answer("gpus", args.gpus, lambda: str(_gpus_here()[0] or 1), _gpu_count)
    device = args.device or _gpus_here()[1] or "H100"
    recipe = Recipe(task, preset, gpus, reserve_gb=20.0 if task in ("grpo", "distill") else 5.0)
    tree = recipe.tree(weights)
    section, name = ("rl", "prompts") if task == "grpo" else ("data", "data_path")
    usual = tree[section][name]
    data = _answer("data", args.data, lambda: usual if isinstance(usual, str) else usual[0])
    settings = {section: {name: [data] if isinstance(usual, list) else data}}
    file = Path(_answer("output", args.output, lambda: f"{recipe.name}.yaml", _free_file))
    tree, best = planned_tree(Recipe(task, preset, gpus, settings, recipe.reserve_gb), device, weights)
    _write(file, heading(recipe, best, str(file), device) + dump(tree))
    print_written(args, file, task=task, model=preset, gpus=gpus, device=device)
    if not args.json:
        print(f"start it with: {start_command(recipe, str(file))}")
    return 0


def _answer(
    name: str,
    option: Any,
    default: Callable[[], str],
    accept: Callable[[Any], Any] = lambda answer: answer,
    choices: str = "",
) -> Any:
    """Return the option's value, converted by `accept`. Without the option, ask until an answer is valid."""
    if option is not None:
        return accept(option)
    if not sys.stdin.isatty():
        raise ConfigError(f"--{name} is missing, and there is no terminal to ask for it; pass the option")
    usual = default()
    while True:
        try:
            return accept(input(f"{QUESTIONS[name]}{choices}? [{usual}] ").strip() or usual)
        except ConfigError as error:
            print(error, file=sys.stderr)


def _preset(preset: str) -> str:
    from megalith.config.presets import PRESETS

    if preset not in PRESETS:
        raise ConfigError(
            f"--model is {preset!r}, which is not a preset{did_you_mean(preset, PRESETS)}; "
            "`megalith config presets` lists them"
        )
    return preset


def _gpu_count(count: str | int) -> int:
    try:
        gpus = int(count)
    except ValueError:
        raise ConfigError(f"--gpus is {count!r}, but must be a whole number") from None
    if gpus < 1:
        raise ConfigError(f"--gpus is {gpus}, but must be at least 1")
    return gpus


def _free_file(path: str) -> str:
    if Path(path).exists():
        raise ConfigError(f"{path} already exists; choose another file, or remove this one")
    return path


@functools.cache
def _gpus_here() -> tuple[int, str | None]:
    """Return the number and the name of this machine's GPUs."""
    import torch

    count = torch.cuda.device_count()
    return count, torch.cuda.get_device_name(0) if count else None


def _task(task: str) -> str:
    from megalith.recipes.catalogue import TASKS

    if task not in TASKS:
        raise ConfigError(f"--task is {task!r}{did_you_mean(task, TASKS)}; choose one of {', '.join(TASKS)}")
    return task
