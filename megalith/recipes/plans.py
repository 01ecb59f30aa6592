"""Adds the planner's best layout to a recipe, and writes it as a run file with a heading.

`make recipes` writes every recipe of the catalogue to recipes/files, and the table of docs/recipes.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from megalith.config import RunConfig
from megalith.errors import ConfigError
from megalith.planner.plan_result import PlannedLayout, changed
from megalith.planner.rates import rates_of
from megalith.planner.search import plan, usable_bytes
from megalith.progress import Progress
from megalith.recipes.catalogue import MODELS, RECIPES, TASKS, Recipe, Tree

FILES = Path(__file__).parent / "files"
DEVICE, DEVICE_NAME = "H100", "H100 (80 GB)"
GIGA = 1e9
PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"  # of a checkout
BEGIN, END = "<!-- megalith.recipes.plans writes this -->\n", "<!-- to here -->\n"
HEADING = "# recipe: "  # of the line that `megalith recipes list` reads


def planned_tree(
    recipe: Recipe, device: str = DEVICE, model: str | None = None
) -> tuple[Tree, PlannedLayout]:
    """Return a recipe's run file with the fastest layout that fits, and that layout.

    Args:
        device: as `megalith plan --device` takes it.
        model: a folder or hub name, in place of the preset's. The layout is planned for the preset.

    Raises:
        ConfigError: no layout fits.
    """
    tree = recipe.tree(model)
    job = {section: dict(values) for section, values in tree.items()}
    job["model"] = {"preset": recipe.preset}
    job["train"].setdefault("train_iters", 1000)
    for name in ("sft", "dpo"):
        job.get(name, {}).pop("num_train_epochs", None)
    rates = rates_of(device)
    memory = usable_bytes(rates) / GIGA - recipe.reserve_gb
    result = plan(RunConfig.from_tree(job), recipe.gpus, rates=rates, memory_gb=memory, top=1)
    if not result.best:
        raise ConfigError(
            f"no layout of {recipe.name} fits on {recipe.gpus} {device}; use more GPUs or a smaller model"
        )
    best = result.best[0]
    for section, values in changed(best).items():
        tree.setdefault(section, {}).update(values)
    tree["train"]["output_dir"] = f"runs/{recipe.name}"
    return tree, best


def heading(recipe: Recipe, best: PlannedLayout, file: str, device: str = DEVICE_NAME) -> str:
    """Return the comment at the top of a recipe's file."""
    task = TASKS[recipe.task]
    model = MODELS.get(recipe.preset, recipe.preset).rpartition("/")[2]
    if recipe.task == "pretrain":
        model = model.partition("-Instruct")[0]  # of an instruction-tuned model, only the tokenizer is used
    of_gpus = f"one {device}" if recipe.gpus == 1 else f"{recipe.gpus} {device}"
    config, speed = best.config, best.speed.tokens_per_second_per_device
    facts = {
        "task": recipe.task,
        "model": recipe.preset,
        "gpus": recipe.gpus,
        "device": device,
        "gb": round(best.bytes / GIGA, 1),
        "tokens_per_second_per_gpu": round(speed),
    }
    tokens = config.train.global_batch_size * config.data.seq_length
    step = f", {best.time.seconds:.2f} s per step of {tokens:,} tokens"
    lines = [
        f"{task.title.format(model=model)} on {of_gpus}.",
        "",
        f"Planned: {best.name}.",
        f"{facts['gb']} GB and {facts['tokens_per_second_per_gpu']:,} tokens/s per GPU"
        f"{_not_counted(recipe) or step}.",
        "",
        f"Data: {task.data}",
        f"Start: {start_command(recipe, file)}",
    ]
    comment = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    return f"{HEADING}{yaml.safe_dump(facts, default_flow_style=True, sort_keys=False, width=1000)}{comment}"


def _not_counted(recipe: Recipe) -> str:
    if recipe.task == "grpo":
        return " in training; sampling takes additional time"
    return ", not counting the teacher" if recipe.task == "distill" else ""


def start_command(recipe: Recipe, file: str) -> str:
    """Return the command that starts a recipe's run file."""
    command = TASKS[recipe.task].command
    if recipe.gpus <= 8:
        return f"megalith {command} {file} --nproc {recipe.gpus}"
    program = "" if command == "train" else f" --program {command}"
    return f"megalith launch slurm {file} --nodes {-(-recipe.gpus // 8)} --gpus-per-node 8{program}"


def text_of(recipe: Recipe) -> str:
    """Return a recipe's run file."""
    tree, best = planned_tree(recipe)
    return heading(recipe, best, f"{recipe.name}.yaml") + dump(tree)


def dump(tree: Tree) -> str:
    """Return a run file's YAML, sections in the order of the settings."""
    order = list(RunConfig.model_fields)
    sections = {name: _plain(tree[name]) for name in sorted(tree, key=order.index) if tree[name]}
    return yaml.safe_dump(sections, sort_keys=False, width=110)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def facts_of(text: str) -> dict[str, Any]:
    """Return the facts in a recipe's first line: task, model, gpus, device, gb, tokens_per_second_per_gpu."""
    return yaml.safe_load(re.match(re.escape(HEADING) + "(.*)", text)[1])


def table() -> str:
    """Return the recipes as a Markdown table."""
    rows = ["| Recipe | Task | GPUs (H100, 80 GB) | GB per GPU | tokens/s per GPU |", "|---|---|---|---|---|"]
    for recipe in RECIPES:
        facts = facts_of((FILES / f"{recipe.name}.yaml").read_text(encoding="utf-8"))
        speed = f"{facts['tokens_per_second_per_gpu']:,}"
        rows.append(f"| `{recipe.name}` | {recipe.task} | {recipe.gpus} | {facts['gb']} | {speed} |")
    return "".join(f"{row}\n" for row in rows)


def main() -> None:
    FILES.mkdir(exist_ok=True)
    with Progress("plan recipes", len(RECIPES), "recipes") as progress:
        for recipe in RECIPES:
            (FILES / f"{recipe.name}.yaml").write_text(text_of(recipe), encoding="utf-8")
            progress.add(1)
    for file in FILES.glob("*.yaml"):
        if file.stem not in {recipe.name for recipe in RECIPES}:
            file.unlink()
    if PAGE.exists():
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
