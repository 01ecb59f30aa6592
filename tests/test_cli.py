"""The command line end to end: text to dataset to model to text, and a help that starts at once."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from megalith.cli import main
from megalith.config.describe import reference_page
from megalith.config.presets import PRESETS

MEGALITH = [sys.executable, "-m", "megalith.cli"]


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
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == list(PRESETS)


@pytest.mark.parametrize(
    "words", [[], ["--help"], ["train", "--help"], ["train", "run.yaml", "-h"], ["preprocess", "-h"],
              ["data", "show", "-h"],
              ["generate", "-h"], ["plot", "-h"], ["config", "-h"], ["tokenizer", "train", "-h"], ["corpus", "-h"],
              ["lora", "export", "-h"], ["lora", "merge", "-h"]],
)  # fmt: skip
def test_help_of_every_command(call, words):
    code, out, err = call(*words)
    if words:
        assert code == 0 and "usage: megalith" in out and not err
    else:
        assert code == 2 and "usage: megalith" in err


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
        "import sys; from megalith.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'rich', 'tokenizers', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "main(['train', '--help']); main(['config', 'schema'])\n"
        "import megalith; megalith.RunConfig.load(None, ['--train.seed', '3'])\n"
        "heavy = {'torch', 'numpy', 'rich', 'tokenizers', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"]])
def test_help_takes_less_than_half_a_second_of_the_processor(words):
    """Of processor time, which other work on the machine does not lengthen much; the best of three."""
    import resource

    used = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*MEGALITH, *words], check=True, stdout=subprocess.DEVNULL, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(used) < 0.5, used


def test_a_reader_that_goes_away_gets_no_traceback():
    process = subprocess.Popen([*MEGALITH, "train", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    error = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=60) in (0, 1) and "Traceback" not in error


def test_python_names_are_there_and_others_are_not():
    import megalith
    import megalith.loading
    import megalith.trainer  # modules that must not take the place of the functions

    assert {"RunConfig", "train", "load"} == set(megalith.__all__)
    assert callable(megalith.load) and callable(megalith.train)
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = megalith.trian
