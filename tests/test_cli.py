"""The command line end to end: text to dataset to model to text, and a help that starts at once."""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import jsonschema
import pytest
import torch
import yaml
from bos_tokenizer import bos_tokenizer
from default_cases import by_default
from forked import run
from transformers import PreTrainedTokenizerFast

import megalith
from megalith.cli.generation import without_nproc
from megalith.cli.main import build_parser, main
from megalith.cli.parser import Parser
from megalith.config.describe import reference_page
from megalith.config.presets import PRESETS
from megalith.data.tokenizers.open_tokenizer import build_tokenizer
from megalith.errors import install_line
from megalith.generation.requests import Completion

MEGALITH = [sys.executable, "-m", "megalith"]


@pytest.fixture
def call(capsys):
    """`call("config", "presets")` → (exit code, stdout, stderr)."""

    def call(*words):
        capsys.readouterr()
        try:
            code = main([str(word) for word in words])
        except SystemExit as error:  # argparse
            code = error.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def run_file(folder: Path, corpus: str, **train) -> Path:
    tree = {
        "model": {"preset": "tiny-llama", "hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 1},
        "data": {"data_path": corpus, "split": "80,20", "seq_length": 16, "tokenizer_type": "ByteTokenizer",
                 "num_workers": 0},
        "optim": {"lr": 0.01},
        "train": {"train_iters": 4, "global_batch_size": 4, "eval_iters": 1, "output_dir": str(folder / "run"),
                  **train},
    }  # fmt: skip
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """A run folder of four steps."""
    folder = tmp_path_factory.mktemp("trained")
    assert main(["train", str(run_file(folder, corpus))]) == 0
    return folder / "run"


def test_text_becomes_a_dataset_a_model_and_text_again(call, tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": f"line {i} of the tiny corpus"}) + "\n" for i in range(50)))
    tokenizer, prefix, output = tmp_path / "tokenizer.json", tmp_path / "data", tmp_path / "run"
    assert call("tokenizer", "train", "--input", source, "--vocab-size", 300, "--output", tokenizer)[0] == 0
    kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokenizer]
    assert (
        call(
            "preprocess", "--input", source, "--output-prefix", prefix, "--append-eod", "--workers", 0, *kind
        )[0]
        == 0
    )
    data = f"{prefix}_text_document"
    code, out, _ = call(
        "train", "--model.preset", "tiny-gpt", "--model.num_layers=1", "train.train_iters=3", "--optim.lr", "1e-3",
        "--data.data_path", data, "--data.split", "80,20", "--data.seq_length", 16, "--data.num_workers", 0,
        "--data.tokenizer_type", "HuggingFaceTokenizer", "--data.tokenizer_model", tokenizer,
        "--train.global_batch_size", 2, "--train.eval_iters", 1, "--train.output_dir", output,
    )  # fmt: skip
    assert code == 0 and "validation loss at iteration 3" in out and "saved" in out
    words = ["generate", output, "--prompt", "line 7", "--max-new-tokens", 5, "--device", "cpu"]
    code, out, _ = call(*words, "--temperature", 0)
    assert code == 0 and out.startswith("line 7")
    assert call(*words, "--seed", 3) == call(*words, "--seed", 3)
    code, out, _ = call("data", "show", data, "--seq-length", 16, "--num-samples", 4, "--index", "0,3", *kind)
    assert code == 0 and "sample 3 (17 tokens)" in out and "tiny corpus" in out


def test_generate_takes_several_prompts_and_a_file_of_them(call, trained, tmp_path):
    (tmp_path / "prompts.txt").write_text("the cat\na mat\n")
    options = ["--max-new-tokens", 3, "--temperature", 0, "--device", "cpu"]
    code, out, _ = call(
        "generate", trained, "--prompt", "one dog", "--prompt-file", tmp_path / "prompts.txt", *options
    )
    parts = out.split("-" * 80 + "\n")
    assert code == 0 and [part[:7] for part in parts] == ["one dog", "the cat", "a mat" + parts[2][5:7]]
    step = trained / "checkpoints" / "step_00000004"
    assert call("generate", step, "--prompt", "one dog", *options)[1] == parts[0]


def test_generate_prints_json_and_streams_the_text_that_it_prints_whole(call, trained, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one dog"}\n\n{"prompt": "the cat"}\n')
    options = ["--max-new-tokens", 6, "--seed", 4, "--device", "cpu"]
    words = ["--prompt-file", tmp_path / "prompts.jsonl", "--num-generations", 2, "--min-p", 0.01, "--json"]
    code, out, _ = call("generate", trained, *words, *options)
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [(each["prompt"], each["generation"]) for each in found] == [
        ("one dog", 0), ("one dog", 1), ("the cat", 0), ("the cat", 1),
    ]  # fmt: skip
    assert all(len(each["ids"]) == len(each["logprobs"]) == 6 and each["truncated"] for each in found)
    whole, stream = (
        call("generate", trained, "--prompt", "one dog", *options, *w)[1] for w in ([], ["--stream"])
    )
    assert stream == whole
    code, _, err = call("generate", trained, "--prompt", "a", "--prompt", "b", "--stream", *options)
    assert code != 0 and "--stream prints a single completion, but there are 2" in err


def test_generate_takes_penalties_bad_words_and_stops(call, trained, tmp_path):
    words = ["generate", trained, "--prompt", "one dog", "--temperature", 0, "--device", "cpu", "--json"]
    words += ["--max-new-tokens", 8]
    plain = json.loads(call(*words)[1])
    penalized = ["--repetition-penalty", 1.8, "--presence-penalty", 0.5, "--frequency-penalty", 0.5]
    other = json.loads(call(*words, *penalized)[1])
    assert other["ids"] != plain["ids"] and len(set(other["ids"])) >= len(set(plain["ids"]))
    letter = next(one for one in plain["text"] if one.isalpha())
    code, out, _ = call(*words, "--bad-word", letter)
    assert code == 0 and json.loads(out)["ids"] != plain["ids"]
    stop = plain["text"][3:6]
    stopped = json.loads(call(*words, "--stop", stop)[1])
    assert stopped["text"] == plain["text"][: plain["text"].find(stop)] and not stopped["truncated"]
    code, _, err = call(*words, "--repetition-penalty", 0)
    assert code != 0 and "repetition_penalty is 0.0; it must be above 0" in err
    (tmp_path / "schema.json").write_text("[]")
    code, _, err = call(*words, "--json-schema", tmp_path / "schema.json")
    assert code != 0 and "contains a list, but a JSON Schema is an object" in err
    code, _, err = call(*words[:4], "--stream", "--stop", "x")
    assert code != 0 and "--stream prints text at once" in err


def test_the_processes_of_generate_get_its_words_without_nproc():
    words = ["run", "--prompt=-a b", "--prompt=c", "--top-k=3", "--seed=5", "--json"]
    args = build_parser().parse_args(["generate", *words, "--nproc", "2", "--temperature", "1"])
    again, given = (
        vars(build_parser().parse_args(["generate", *each])) for each in (without_nproc(args), words)
    )
    assert again | {"parser": None} == given | {"parser": None}


def test_generate_samples_the_entries_of_the_tokenizer_alone(call, trained, monkeypatch):
    given = {}
    completion = Completion(0, 0, [66], [-0.5], truncated=True)

    def complete(model, prompts, sampling, **options):
        given.update(vars(sampling))
        return [completion]

    monkeypatch.setattr("megalith.generation.sampling.complete", complete)
    assert call("generate", trained, "--prompt", "A", "--device", "cpu")[:2] == (0, "AB\n")
    assert given["vocab_size"] == 257


def test_generate_begins_a_prompt_as_its_tokenizer_does_and_shows_its_text(
    call, trained, tmp_path, monkeypatch
):
    bos_tokenizer(tmp_path, "")
    prompts = []

    def complete(model, ids, sampling, **options):
        prompts.extend(ids)
        return [Completion(0, 0, [33], [-0.5], truncated=True)]

    monkeypatch.setattr("megalith.generation.sampling.complete", complete)
    monkeypatch.setattr(
        "megalith.cli.generation.checkpoint_tokenizer",
        lambda *_: build_tokenizer("HuggingFaceTokenizer", tmp_path),
    )
    code, out, _ = call("generate", trained, "--prompt", "A", "--device", "cpu")
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert (code, out) == (0, "A" + reference.decode([33]) + "\n")
    assert prompts == [reference("A").input_ids] and len(prompts[0]) == 2


def test_data_show_prints_json_that_is_the_samples_of_training(call, corpus):
    words = ["data", "show", corpus, "--seq-length", 8, "--seed", 5, "--num-samples", 20, "--split", "80,20"]
    code, out, _ = call(*words, "--which", "valid", "--index", "0,7", "--json")
    samples = json.loads(out)
    assert code == 0 and [list(sample) for sample in samples] == [["index", "tokens"]] * 2
    assert [sample["index"] for sample in samples] == [0, 7]
    assert all(len(sample["tokens"]) == 9 for sample in samples)
    blend = call("data", "show", "0.7", corpus, "0.3", corpus, *words[3:], "--index", "2", "--json")
    assert blend == call("data", "show", f"0.7 {corpus} 0.3 {corpus}", *words[3:], "--index", "2", "--json")


def test_plot_draws_a_png_and_a_curve_in_text(call, trained, tmp_path):
    code, out, _ = call("plot", trained)
    assert code == 0 and out.strip() == str(trained / "loss.png")
    assert (trained / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert call("plot", trained, trained, "--output", tmp_path / "two.png")[0] == 0
    code, out, _ = call("plot", trained, "--text")
    assert code == 0 and "step 1" in out and "┤" in out


def test_config_commands_print_schema_reference_and_presets(call, corpus, tmp_path):
    code, out, _ = call("config", "schema")
    assert code == 0
    jsonschema.validate(yaml.safe_load(run_file(tmp_path, corpus).read_text()), json.loads(out))
    assert call("config", "reference") == (0, reference_page(), "")
    code, out, _ = call("config", "presets")
    heading, *rows = [line.split() for line in out.splitlines()]
    assert code == 0 and [row[0] for row in rows] == list(PRESETS)
    assert heading[:5] == ["preset", "parameters", "active", "layers", "hidden"]
    table = {row[0]: row[1:] for row in rows}
    assert table["llama3-8b"] == ["8.03B", "32", "4096", "32", "8", "14336", "128,256", "8,192"]
    assert table["mixtral-8x7b"][:3] == ["46.7B", "12.9B", "32"]
    assert table["tiny-gpt"][:4] == ["100k", "+", "vocabulary", "2"]


@pytest.mark.parametrize(
    "words", [["--help"], ["train", "--help"], ["train", "run.yaml", "-h"], ["preprocess", "-h"],
              ["data", "show", "-h"], [], ["config"], ["checkpoint"],
              ["generate", "-h"], ["plot", "-h"], ["config", "-h"], ["tokenizer", "train", "-h"], ["corpus", "-h"],
              ["lora", "export", "-h"], ["lora", "merge", "-h"]],
)  # fmt: skip
def test_help_of_every_command(call, words):
    code, out, err = call(*words)
    assert code == 0 and "usage: megalith" in out and not err


def commands(parser: Parser) -> Iterator[Parser]:
    """Every command below `parser`."""
    for name, found in parser.commands.choices.items():
        if found.commands is not None:
            yield from commands(found)
        elif name != "train":  # its options are the configuration's
            yield found


def test_every_default_stands_in_the_help():
    found = list(commands(build_parser()))
    assert len(found) > 15
    for command in found:
        described = re.split(r"\n(?=  \S)", command.format_help())
        for action in command._actions:
            if action.default not in (None, False, argparse.SUPPRESS):
                (text,) = (part for part in described if part.lstrip().startswith(action.option_strings[0]))
                assert "(default" in text, (command.prog, action.dest)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["trian", "run.yaml"], ["unknown command `megalith trian`", "did you mean 'train'?"]),
        (["checkpoint", "lst"], ["unknown command `megalith checkpoint lst`", "did you mean 'list'?"]),
        (["train"], ["`megalith train` needs a run file"]),
        (["zzz"], ["unknown command `megalith zzz`", "`megalith --help` lists them all"]),
        (["generate", "run", "--tempreature", "1"], ["takes no '--tempreature 1'", "did you mean '--temperature'?"]),
        (["generate", "run", "--seed", "one"], ["--seed: invalid int value: 'one'", "`megalith generate --help`"]),
        (["plot"], ["required: run_dir", "`megalith plot --help`"]),
        (["parity", "run.yaml", "--model.num_layer", "2"], ["unknown setting model.num_layer", "model.num_layers"]),
        (["parity", "run.yaml", "stray"], ["unexpected argument 'stray'"]),
    ],
)  # fmt: skip
def test_a_word_that_is_nearly_right_is_told_the_right_one(call, corpus, tmp_path, monkeypatch, words, parts):
    monkeypatch.chdir(tmp_path)
    run_file(tmp_path, corpus)
    code, out, err = call(*words)
    assert code == 2 and not out and err.startswith("error: ") and err.count("\n") == 1
    assert all(part in err for part in parts), err


@pytest.mark.parametrize("given", [["--model.num_layers", "3", "--nproc-max", "2"], ["model.num_layers=3"],
                                   ["--nproc-max", "2", "--model.num_layers=3"]])  # fmt: skip
def test_parity_takes_settings_as_train_does(call, corpus, tmp_path, monkeypatch, given):
    taken = []
    monkeypatch.setattr(
        "megalith.cli.parity_command.shrink", lambda config, *rest: taken.append(config) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        call("parity", run_file(tmp_path, corpus), *given)
    assert taken[0].model.num_layers == 3


def test_version_names_what_a_report_of_a_fault_needs(call):
    code, out, _ = call("--version")
    assert code == 0 and out.startswith(
        f"megalith {megalith.__version__}, torch {torch.__version__.partition('+')[0]}"
    )


def test_training_says_that_it_starts_before_anything_slow_is_imported():
    slow = "import sys; sys.modules.update(torch=None, pydantic=None, numpy=None)\n"
    code = slow + "from megalith.cli.main import main; main(['train', 'run.yaml', '--nproc', '8'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (
        done.returncode == 1
        and done.stdout == f"megalith {megalith.__version__}: train run.yaml, loading PyTorch\n"
    )


def test_the_line_that_installs_an_extra_works_in_a_checkout_and_beside_one(monkeypatch, tmp_path):
    root = Path(megalith.__file__).parents[1]
    monkeypatch.chdir(tmp_path)
    assert install_line("log") == f"pip install --editable '{root}[log]'"
    monkeypatch.chdir(root)
    assert install_line("log") == "pip install --editable '.[log]'"
    monkeypatch.setattr(
        "megalith.errors.__file__", str(tmp_path / "site-packages" / "megalith" / "errors.py")
    )
    assert install_line("log") == "pip install 'megalith[log]'"


def test_train_help_has_every_section_and_the_launcher(call):
    out = call("train", "--help")[1]
    for word in (
        "--nproc",
        "--model.num_layers",
        "--parallel.tensor_model_parallel_size",
        "--train.bf16",
        "(default 99,1,0)",
    ):
        assert word in out


def test_help_imports_neither_torch_nor_numpy_nor_the_configuration():
    code = (
        "import sys; from megalith.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'rich', 'tokenizers', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "main(['train', '--help']); main(['config', 'schema'])\n"
        "import megalith; megalith.RunConfig.load(None, ['--train.seed', '3'])\n"
        "heavy = {'torch', 'numpy', 'rich', 'tokenizers', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)


@pytest.mark.skipif(
    find_spec("triton") is not None and torch.backends.cuda.is_built(),
    reason="where kernels are imported, torch.library.triton_op imports torch._dynamo",
)
def test_a_plan_waits_for_no_import_that_it_does_not_need():
    code = (
        "import sys; from megalith.cli.main import main\n"
        "assert main(['plan', 'gpt2', '--gpus', '2', '--global-batch-size', '4']) == 0\n"
        "heavy = {'torch.distributed.tensor', 'sympy', 'torch._dynamo', 'triton', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=600)


def processor_seconds(command):
    import resource

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("words", by_default([["--help"], ["train", "--help"]], ["train", "--help"]))
def test_help_takes_little_more_than_the_packages_that_it_needs(words):
    """The limit is a multiple of importing pydantic and PyYAML, because the speed of machines differs by a factor of
    two. The whole takes 2.5 times as long as that; importing torch would add ten times as much. Each pair is measured
    in one go and the least ratio counts, because other work on a machine slows a part of the runs by half."""
    packages = [sys.executable, "-c", "import yaml; from pydantic import BaseModel"]
    ratios = (processor_seconds([*MEGALITH, *words]) / processor_seconds(packages) for _ in range(8))
    assert any(ratio < 3.2 for ratio in ratios)


def test_a_reader_that_goes_away_gets_no_traceback():
    process = subprocess.Popen([*MEGALITH, "train", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    error = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=60) in (0, 1) and "Traceback" not in error


def test_python_names_are_there_and_others_are_not():
    import megalith.training.loading
    import megalith.training.trainer  # modules that must not take the place of the functions

    assert {"RunConfig", "train", "load", "Model", "ModelSpec", "parallelize", "Mesh", "Loader"} <= set(
        megalith.__all__
    )
    assert all(getattr(megalith, name) is not None for name in megalith.__all__)
    assert callable(megalith.load) and callable(megalith.train)
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = megalith.trian


BENCH = """
import subprocess, sys
from forked import ForkedPopen
from megalith.cli.main import main

subprocess.Popen = ForkedPopen  # the job that is measured
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.processes
def test_bench_trains_a_workload_on_the_cpu_and_appends_its_figures(tmp_path):
    results, small = tmp_path / "results.jsonl", ("--batch", 2, "--set", "data.seq_length=32")
    done = run(["-c", BENCH, "bench", "tiny", "--steps", 2, "--warmup", 1, "--results", results, *small])
    assert done.returncode == 0, done
    figures = json.loads(results.read_text())
    assert "no GPU found" in done.stderr and figures["step_time_ms"] > 0
    assert re.search(
        r"^tiny one \| step_time_ms [\d.]+ \| tokens_per_second_per_device \d+", done.stdout, re.M
    )
