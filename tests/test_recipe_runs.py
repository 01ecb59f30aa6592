"""Every recipe runs: its own file, data of the kind that it names, and a small model in place of its preset."""

import json
import math
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pyarrow
import pyarrow.parquet
import pytest
import yaml
from default_cases import by_default

from megalith.cli.main import main
from megalith.config import RunConfig
from megalith.parallel.pipeline.stages import assign_layers
from megalith.parity.sizes import shrink
from megalith.recipes.catalogue import MODELS, RECIPES, TASKS, Recipe
from megalith.recipes.plans import FILES
from megalith.report.metrics import read_records

CHAT_TEMPLATE = Path(__file__).parents[1] / "examples" / "sft" / "chat.jinja"
AXES = ("tensor", "context", "pipeline")
SEVERAL_RANKS = (  # settings that one process refuses
    "virtual_pipeline_model_parallel_size", "pipeline_schedule", "sequence_parallel",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
)  # fmt: skip
SIZES = {  # section → settings that make a recipe's job small
    "data": {"seq_length": 64, "num_workers": 0, "split": "80,20,0"},
    "train": {"global_batch_size": 4, "micro_batch_size": 1, "eval_iters": 1},
    "runtime": {"device": "cpu", "compile": False},
    "rl": {"num_generations": 2, "max_prompt_length": 32, "max_completion_length": 8},
    "sft": {"num_train_epochs": 1},
    "dpo": {"num_train_epochs": 1},
}
BY_NAME = {recipe.name: recipe for recipe in RECIPES}
BY_DEFAULT = [
    "gpt2-pretrain-1gpu", "deepseek-v2-lite-pretrain-16gpu", "llama3.3-70b-sft-32gpu", "qwen3-14b-lora-1gpu",
    "llama3.1-8b-dpo-8gpu", "qwen2.5-0.5b-grpo-1gpu", "llama3.2-1b-distill-2gpu",
]  # fmt: skip
IN_LAYOUT = ["qwen3-32b-lora-2gpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with data of every task and a tokenizer, in which models are made as recipes need them."""
    folder = tmp_path_factory.mktemp("recipes")
    sums = [(f"What is {a} and {b}?", str(a + b), str(a * b + 1)) for a in range(6) for b in range(6)]
    user = lambda text: [{"role": "user", "content": text}]  # noqa: E731
    bot = lambda text: [{"role": "assistant", "content": text}]  # noqa: E731
    rows = {
        "corpus": [{"text": f"{question} {right}. " * 4} for question, right, _ in sums],
        "chat": [{"messages": user(question) + bot(right)} for question, right, _ in sums],
        "preferences": [
            {"prompt": user(question), "chosen": bot(right), "rejected": bot(wrong)}
            for question, right, wrong in sums
        ],
    }
    problems = folder / "data/gsm8k/main/train-00000-of-00001.parquet"
    problems.parent.mkdir(parents=True)
    table = {"question": [row[0] for row in sums], "answer": [f"#### {row[1]}" for row in sums]}
    pyarrow.parquet.write_table(pyarrow.table(table), problems)
    for name, lines in rows.items():
        (folder / f"data/{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        words = ["--input", "data/corpus.jsonl", "--vocab-size", "300", "--output", "tokenizer"]
        assert main(["tokenizer", "train", *words]) == 0
        yield folder


def small_model(preset: str) -> dict[str, Any]:
    """Return the settings of a preset's model with the sizes of a parity run, for any tokenizer."""
    job = {"model": {"preset": preset}, "data": {"mock": True}, "optim": {"lr": 1e-3}}
    model = shrink(RunConfig.from_tree(job | {"train": {"global_batch_size": 8, "train_iters": 1}}), 1).model
    settings = model.model_dump(exclude_defaults=True) | {"max_position_embeddings": 64}
    return {name: value for name, value in settings.items() if name not in ("vocab_size", "preset")}


def write_model(hub: str, preset: str) -> None:
    """Write a Hugging Face folder of a preset's small model to the path that its hub name is."""
    if Path(hub, "config.json").exists():
        return
    train = {
        "train_iters": 1,
        "global_batch_size": 1,
        "micro_batch_size": 1,
        "output_dir": f"runs/of-{preset}",
    }
    tokenizer = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "tokenizer"}
    tree = {
        "model": small_model(preset),
        "data": tokenizer
        | {"data_path": ["data/corpus.jsonl"], "seq_length": 64, "num_workers": 0, "split": "1,0,0"},
        "optim": {"lr": 1e-3},
        "train": train,
        "runtime": SIZES["runtime"],
    }
    Path("model.yaml").write_text(yaml.safe_dump(tree))
    assert main(["train", "model.yaml"]) == 0
    shutil.rmtree(hub, ignore_errors=True)  # a pre-training recipe's tokenizer
    assert main(["export-hf", train["output_dir"], hub]) == 0
    (Path(hub) / "chat_template.jinja").write_text(CHAT_TEMPLATE.read_text())


def small_job(recipe: Recipe, layout: Callable[[int], int]) -> dict[str, Any]:
    """Return a recipe's file with a small model and small data, and the sizes that `layout` gives for its axes."""
    tree = yaml.safe_load((FILES / f"{recipe.name}.yaml").read_text())
    for section, values in SIZES.items():
        if section in tree or section in ("runtime", "train"):
            tree.setdefault(section, {}).update(values)
    if "preset" in tree["model"]:
        tree["model"] = small_model(recipe.preset)
    tree["optim"].pop("lr_warmup_iters", None)
    if not {"sft", "dpo"} & set(tree):
        tree["train"]["train_iters"] = 2
    if tree["train"].get("eval_interval"):
        tree["train"]["eval_interval"] = 2
    tree["checkpoint"]["save_interval"] = 2
    parallel = tree.setdefault("parallel", {})
    for name in (*AXES, "expert"):
        key = "context_parallel_size" if name == "context" else f"{name}_model_parallel_size"
        parallel[key] = layout(parallel.get(key, 1))
    if layout(2) == 1:
        tree["parallel"] = {name: value for name, value in parallel.items() if name not in SEVERAL_RANKS}
    elif "virtual_pipeline_model_parallel_size" in parallel:
        parallel["virtual_pipeline_model_parallel_size"] = 2
        chunks = 2 * parallel["pipeline_model_parallel_size"]
        others = sum(
            parallel.get(f"account_for_{part}_in_pipeline_split", False) for part in ("embedding", "loss")
        )
        if others:
            tree["model"]["num_layers"] += -(tree["model"]["num_layers"] + others) % chunks
    return tree


def run_small(recipe: Recipe, layout: Callable[[int], int], output: str) -> list[float]:
    """Run a recipe's small job with the command that its file names; return the losses."""
    if recipe.task == "pretrain":
        shutil.copytree("tokenizer", MODELS[recipe.preset], dirs_exist_ok=True)
    else:
        for preset in {recipe.preset, *(["llama3.1-8b"] if recipe.task == "distill" else [])}:
            write_model(MODELS[preset], preset)
    tree = small_job(recipe, layout)
    tree["train"]["output_dir"] = output
    size = lambda name: tree["parallel"].get(f"{name}_parallel_size", 1)  # noqa: E731
    replicas = size("tensor_model") * size("context")
    processes = size("pipeline_model") * max(replicas, size("expert_model"))
    if layout(2) > 1:
        processes = max(processes, min(recipe.gpus, 2))
    Path("run.yaml").write_text(yaml.safe_dump(tree))
    words = shlex.split(f"{TASKS[recipe.task].command} run.yaml")
    if processes > 1:
        done = forked.run(["-m", "megalith", *words, "--nproc", processes])
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        assert main(words) == 0
    return [record["loss"] for record in read_records(Path(output) / "metrics.jsonl")]


@pytest.mark.parametrize("name", [name for name, each in BY_NAME.items() if each.gpus > 1])
def test_the_layers_of_a_shrunk_recipe_fill_its_stages(name):
    """The longer cases below, which run them, are few by default."""
    tree = small_job(BY_NAME[name], lambda size: min(size, 2))
    if "init_from" in tree["model"]:
        tree["model"] = small_model(BY_NAME[name].preset)
    config = RunConfig.from_tree(tree)
    stages = assign_layers(config.model, config.parallel)
    assert len(stages) == config.parallel.pipeline_model_parallel_size


@pytest.mark.parametrize("name", by_default(BY_NAME, *BY_DEFAULT))
def test_a_recipe_runs_shrunk_in_one_process(folder, monkeypatch, name):
    monkeypatch.chdir(folder)
    losses = run_small(BY_NAME[name], lambda size: 1, f"runs/{name}")
    assert len(losses) >= 2 and all(math.isfinite(loss) for loss in losses)


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", by_default([name for name, each in BY_NAME.items() if each.gpus > 1], *IN_LAYOUT)
)
def test_a_recipe_runs_shrunk_in_its_layout_with_axes_of_two(folder, monkeypatch, name):
    monkeypatch.chdir(folder)
    losses = run_small(BY_NAME[name], lambda size: min(size, 2), f"runs/{name}-layout")
    assert len(losses) >= 2 and all(math.isfinite(loss) for loss in losses)
