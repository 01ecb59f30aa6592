"""`--json` prints one document with the keys that docs/command_line.md lists; shell completion; help of a section."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megalith.cli.commands import COMMANDS
from megalith.cli.completion import words_by_command
from megalith.cli.json_output import print_json
from megalith.cli.main import build_parser, main
from megalith.cli.parser import option_strings
from megalith.cli.training import launcher_words
from megalith.config.describe import help_text

PAGE = (Path(__file__).parents[1] / "docs" / "command_line.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`.*?) \| (.*) \|$", PAGE, re.MULTILINE)
KEYS = {name: keys for names, keys in ROWS for name in re.findall(r"`([^`]+)`", names)}
WITHOUT = {  # commands whose output is not a result, or is JSON without an option
    "serve", "completion", "config schema", "config reference",
}  # fmt: skip


@pytest.fixture
def document(capsys):
    """`document("config", "presets")` runs the command with `--json` and returns the document on stdout."""

    def document(*words):
        capsys.readouterr()
        assert main([*map(str, words), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return document


def listed(name: str) -> list[str]:
    return re.findall(r"`([^`]+)`", KEYS[name])


def parser_of(name: str):
    parser = build_parser(name.split())
    for word in name.split():
        parser = parser.commands.choices[word]
    return parser


def test_every_command_that_prints_results_has_the_option_and_is_on_the_page():
    for name, command in COMMANDS.items():
        if command.run == "training:train":
            assert "--json" in launcher_words() and name in KEYS
        elif command.options is not None and name not in WITHOUT:
            assert "--json" in option_strings(parser_of(name)), name
            assert name in KEYS, name


def test_commands_on_data_print_the_listed_keys(document):
    Path("text.jsonl").write_text("".join(json.dumps({"text": f"a cat sat {n}"}) + "\n" for n in range(20)))
    trained = document(
        "tokenizer", "train", "--input", "text.jsonl", "--vocab-size", 300, "--output", "t.json"
    )
    assert sorted(trained) == sorted(listed("tokenizer train")) and trained["documents"] == 20
    words = [
        "--input",
        "text.jsonl",
        "--output-prefix",
        "text",
        "--tokenizer-type",
        "ByteTokenizer",
        "--workers",
        0,
    ]
    written = document("preprocess", *words)
    assert sorted(written) == sorted(listed("preprocess"))
    assert written["documents"] == [20] and Path(f"{written['prefixes'][0]}.idx").exists()


def test_commands_on_a_run_print_the_listed_keys(document, run):
    result = run(train=dict(train_iters=2, eval_interval=2), checkpoint=dict(save_interval=1))
    (first, second) = document("checkpoint", "list", "run")
    assert list(first) == [key for key in listed("checkpoint list") if key != "error"]
    assert (first["step"], second["step"], Path(second["path"]).resolve()) == (1, 2, result.checkpoint)
    assert [step["problems"] for step in document("checkpoint", "verify", "run")] == [[], []]
    hashed = document("checkpoint", "hash", "run", "--part", "model")
    assert list(hashed) == listed("checkpoint hash") and hashed["tensors"][0]["part"] == "model"
    count = len(document("checkpoint", "hash", "run")["tensors"])
    assert document("checkpoint", "diff", "run", "run") == {"equal": count, "different": []}
    assert document("checkpoint", "reshard", "run", "again", "--files", 1)["path"].startswith("again")
    averaged = document("checkpoint", "average", first["path"], second["path"], "--out", "mean")
    assert list(averaged) == listed("checkpoint average") and averaged["checkpoints"] == 2
    (state,) = document("watch", "run")
    assert list(state) == listed("watch") and (state["step"], state["last"]["step"]) == (2, 2)
    (curve,) = document("plot", "run", "--text")
    assert list(curve) == listed("plot --text") and [step for step, _ in curve["losses"]] == [1, 2]
    assert document("report", "run") == {"path": "run/report.html"}
    evaluated = document("evaluate", "run")
    assert (
        set(evaluated) <= set(listed("evaluate")) and evaluated["validation_loss"] == result.validation_loss
    )


def test_training_prints_its_result_after_its_text_on_stderr(capsys, corpus):
    words = ["--model.preset", "tiny-gpt", "--model.hidden_size", "32", "--model.num_attention_heads", "2",
             "--data.data_path", corpus, "--data.seq_length", "16", "--data.tokenizer_type", "ByteTokenizer",
             "--data.num_workers", "0", "--optim.lr", "0.01", "--train.train_iters", "1",
             "--train.global_batch_size", "1",
             "--train.output_dir", "run", "--runtime.device", "cpu"]  # fmt: skip
    assert main(["train", "--json", *words]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert list(result) == listed("train") and (result["step"], result["ended"]) == (1, "train_iters")
    assert Path(result["checkpoint"]).is_dir() and "megalith" in printed.err


def test_other_commands_print_the_listed_keys(document):
    presets = document("config", "presets")
    assert list(presets[0]) == listed("config presets")
    assert {p["preset"]: p["parameters"] for p in presets}["gpt2"] == 124_439_808
    recipes = document("recipes", "list", "--task", "sft")
    assert set(listed("recipes list")) <= set(recipes[0])
    shown = document("recipes", "show", recipes[0]["name"])
    assert shown["run_file"].startswith("#") and shown["task"] == "sft"
    assert document("recipes", "copy", recipes[0]["name"], "mine.yaml") == {"path": "mine.yaml"}
    pipeline = document("pipeline", "show", "--stages", 2, "--micro-batches", 4)
    assert list(pipeline) == listed("pipeline show") and pipeline["bubble"] == pytest.approx(1 / 5)


def test_numbers_that_json_lacks_are_null(capsys):
    print_json({"loss": float("nan"), "all": [float("inf"), 1.0], "path": Path("run")})
    assert json.loads(capsys.readouterr().out) == {"loss": None, "all": [None, 1.0], "path": "run"}


def test_completion_offers_commands_options_and_settings():
    words = words_by_command()
    assert (
        "checkpoint" in words[""] and "diff" in words["checkpoint"] and "--part" in words["checkpoint diff"]
    )
    assert {"--optim.lr", "--nproc", "--json"} <= set(words["train"]) and "--top" in words["plan"]


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_bash_completes_from_the_script(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    for typed, expected in {
        "checkpoint di": ["diff"],
        "checkpoint diff --pa": ["--part"],
        "train run.yaml --optim.lr_decay_st": ["--optim.lr_decay_style"],
        "repo": ["report"],
    }.items():
        place = len(typed.split())
        call = f'COMP_WORDS=(megalith {typed}); COMP_CWORD={place}; _megalith; echo "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", script + call], capture_output=True, text=True, check=True)
        assert done.stdout.split() == expected


def test_help_of_a_section_or_a_word():
    optim = help_text("optim")
    assert "--optim.lr float" in optim and "--train.train_iters" not in optim
    warmup = help_text("--lr-warmup")
    assert "--optim.lr_warmup_iters" in warmup and "--optim.weight_decay " not in warmup
    with pytest.raises(Exception, match=r"no setting has 'optimm'.*did you mean 'optim'"):
        help_text("optimm")
