"""Recipes: every file is the catalogue's job with a layout that the trainer accepts and the planner expects to fit."""

import json
import sys

import pytest
import yaml

from megalith.cli.main import main
from megalith.config import RunConfig
from megalith.parallel.pipeline.pipeline_rules import check_layout
from megalith.planner.rates import rates_of
from megalith.planner.search import planned, usable_bytes
from megalith.recipes.catalogue import RECIPES, Recipe
from megalith.recipes.plans import BEGIN, DEVICE, END, FILES, PAGE, facts_of, table

BY_NAME = {recipe.name: recipe for recipe in RECIPES}
EPOCHS = {"sft", "dpo"}


def job_of(tree: dict, recipe: Recipe) -> RunConfig:
    """Return a recipe's file as a configuration that needs no files: a preset, and a length in steps."""
    tree = {section: dict(values) for section, values in tree.items()}
    tree["model"] = {"preset": recipe.preset}
    for section in EPOCHS & set(tree):
        del tree[section]["num_train_epochs"]
        tree["train"]["train_iters"] = 1000
    return RunConfig.from_tree(tree)


def test_every_recipe_has_its_file():
    assert {file.stem for file in FILES.glob("*.yaml")} == set(BY_NAME)
    assert len(BY_NAME) == len(RECIPES)
    assert f"{BEGIN}{table()}{END}" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_file_is_the_catalogues_job_with_a_layout_that_fits(recipe):
    """If this fails after a change of the planner or of the catalogue: make recipes."""
    text = (FILES / f"{recipe.name}.yaml").read_text(encoding="utf-8")
    tree, facts = yaml.safe_load(text), facts_of(text)
    for section, values in recipe.tree().items():
        assert tree.get(section, {}).items() >= {name: v for name, v in values.items() if v != {}}.items()
    config, rates = job_of(tree, recipe), rates_of(DEVICE)
    check_layout(config, recipe.gpus)
    layout = planned(config, recipe.gpus, rates)
    assert layout.bytes <= usable_bytes(rates) - recipe.reserve_gb * 1e9
    assert facts["gb"] == pytest.approx(layout.bytes / 1e9, abs=0.1)
    assert facts["tokens_per_second_per_gpu"] == pytest.approx(
        layout.speed.tokens_per_second_per_device, abs=0.51
    )


def test_recipes_are_listed_shown_and_copied(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "list", "--task", "lora", "--gpus", "1", "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)]
    assert "llama3.1-8b-lora-1gpu" in names and all("-lora-1gpu" in name for name in names)
    assert main(["recipes", "list", "--model", "llama3.2-1b"]) == 0
    assert "llama3.2-1b-pretrain-1gpu" in capsys.readouterr().out
    assert main(["recipes", "show", "qwen3-0.6b-sft-1gpu"]) == 0
    shown = capsys.readouterr().out
    assert main(["recipes", "copy", "qwen3-0.6b-sft-1gpu", "mine.yaml"]) == 0
    copied = (tmp_path / "mine.yaml").read_text()
    assert yaml.safe_load(copied) == yaml.safe_load(shown)
    assert "megalith sft mine.yaml --nproc 1" in copied
    printed = capsys.readouterr().out
    assert "Data: data/chat.jsonl: " in printed and "Start: megalith sft mine.yaml --nproc 1" in printed
    assert main(["recipes", "copy", "qwen3-0.6b-sft-1gpu", "mine.yaml"]) == 2
    assert "mine.yaml already exists" in capsys.readouterr().err
    assert main(["recipes", "show", "qwen3-0.6b-sft-2gpu"]) == 2
    assert "did you mean 'qwen3-0.6b-sft-1gpu'" in capsys.readouterr().err
    assert main(["recipes", "list", "--task", "stf"]) == 2
    assert "did you mean 'sft'" in capsys.readouterr().err


def test_init_writes_a_run_file_for_the_machine_at_hand(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [
        "--task",
        "lora",
        "--model",
        "llama3.2-1b",
        "--gpus",
        "2",
        "--data",
        "my.jsonl",
        "--output",
        "run.yaml",
    ]
    assert main(["init", *words, "--device", "A100-40GB"]) == 0
    text = (tmp_path / "run.yaml").read_text()
    tree = yaml.safe_load(text)
    assert tree["data"]["data_path"] == "my.jsonl" and tree["lora"]["rank"] == 16
    assert "2 A100-40GB" in text and "megalith sft run.yaml --nproc 2" in text
    config = job_of(tree, Recipe("lora", "llama3.2-1b", 2))
    assert planned(config, 2, rates_of("A100-40GB")).fits


def test_init_asks_for_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    answers = iter(["pretrain", "", "1", "corpus/*.jsonl", ""])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    assert main(["init", "--device", "H100"]) == 0
    tree = yaml.safe_load((tmp_path / "qwen3-0.6b-pretrain-1gpu.yaml").read_text())
    assert tree["model"] == {"preset": "qwen3-0.6b"} and tree["data"]["data_path"] == ["corpus/*.jsonl"]


def test_init_asks_again_after_an_answer_that_it_cannot_use(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.yaml").write_text("")
    answers = iter(
        ["dpoo", "dpo", "llama3.2-1", "llama3.2-1b", "none", "0", "2", "", "taken.yaml", "run.yaml"]
    )
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    assert main(["init", "--device", "H100"]) == 0
    printed = capsys.readouterr()
    for sentence in (
        "--task is 'dpoo'; did you mean 'dpo'",
        "--model is 'llama3.2-1', which is not a preset; did you mean 'llama3.2-1b'",
        "--gpus is 'none', but must be a whole number",
        "--gpus is 0, but must be at least 1",
        "taken.yaml already exists; choose another file",
    ):
        assert sentence in printed.err
    assert "start it with: megalith dpo run.yaml --nproc 2" in printed.out
    assert (
        yaml.safe_load((tmp_path / "run.yaml").read_text())["data"]["data_path"] == "data/preferences.jsonl"
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--task", "sfft"], "did you mean 'sft'"),
        (["--task", "sft", "--model", "qwen3-06b"], "did you mean 'qwen3-0.6b'"),
        (["--task", "sft", "--model", "gpt3-13b"], "preset gpt3-13b has no hub name"),
        (["--task", "sft", "--model", "qwen3-0.6b", "--gpus", "0"], "--gpus is 0, but must be at least 1"),
        (["--task", "sft"], "--model is missing, and there is no terminal to ask"),
    ],
)
def test_mistakes_get_a_sentence(words, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert main(["init", *words, "--data", "x", "--output", "run.yaml"]) == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
