"""Each kind of bad input through the command line: an exit code, a sentence on stderr, and nothing half written."""

import json
import os
import shutil
from pathlib import Path

import forked
import numpy as np
import pytest
import yaml

from megalith.cli.main import main
from megalith.data.indexed import IndexedWriter
from megalith.launch import agent
from megalith.launch.lock import OutputLock

CONFIG, DATA, CHECKPOINT = 2, 3, 4


@pytest.fixture
def place(corpus, tmp_path, monkeypatch):
    """The working folder, with a run file for a small model over a dataset of its own at ./data."""
    monkeypatch.chdir(tmp_path)
    for suffix in (".bin", ".idx"):
        shutil.copy(corpus + suffix, f"data{suffix}")
    tree = {
        "model": {"preset": "tiny-gpt", "num_layers": 1, "hidden_size": 32, "num_attention_heads": 2},
        "data": {"data_path": "data", "split": "80,20", "seq_length": 16, "tokenizer_type": "ByteTokenizer",
                 "num_workers": 0},
        "optim": {"lr": 0.01},
        "train": {"train_iters": 2, "global_batch_size": 2, "eval_iters": 1, "output_dir": "run"},
    }  # fmt: skip
    Path("run.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every path below, with its bytes where it is a file; the lock's text changes hands and does not count."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if path.name != ".lock"
    }


@pytest.fixture
def refused(place, capsys, monkeypatch):
    """`refused(words, exit_code, *parts)`: the command ends so, says these parts in a line, and changes no file.

    Of training so does the launcher, which starts no process; with `by_ranks_alone` it would."""
    monkeypatch.setattr(agent, "build_agent", lambda *args: pytest.fail("the launcher starts processes"))

    def one(words, exit_code, *parts):
        before = contents(place)
        capsys.readouterr()
        code = main([str(word) for word in words])
        err = capsys.readouterr().err
        assert code == exit_code, err
        assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err, err
        for part in parts:
            assert part in err, err
        assert contents(place) == before

    def refused(words, exit_code, *parts, by_ranks_alone=False):
        one(words, exit_code, *parts)
        if words[0] == "train" and "--nproc" not in words and not by_ranks_alone:
            one([*words, "--nproc", "1"], exit_code, *parts)

    return refused


def test_the_run_file_that_each_case_spoils_is_good(place):
    assert main(["train", "run.yaml"]) == 0


CONFIGURATIONS = [
    (["nowhere.yaml"], "there is no run file nowhere.yaml"),
    (["."], "cannot be read", "directory"),
    (["data.bin"], "data.bin"),
    (["run.yaml", "--train.train_iter", "5"], "unknown setting train.train_iter", "did you mean train.train_iters"),
    (["run.yaml", "--num_layers", "5"], "did you mean model.num_layers"),
    (["run.yaml", "stray"], "unexpected argument 'stray'"),
    (["run.yaml", "--train.train_iters", "many"], "train.train_iters is 'many'", "whole number"),
    (["run.yaml", "--train.train_iters"], "train.train_iters is True"),
    (["run.yaml", "--model.preset", "gpt5"], "unknown preset 'gpt5'", "known: "),
    (["run.yaml", "--model.num_attention_heads", "3"], "hidden_size 32 is not divisible", "3"),
    (["run.yaml", "--train.micro_batch_size", "3"], "(2) is not a multiple of micro_batch_size (3) ×"),
    (["run.yaml", "--data.seq_length", "64", "--model.max_position_embeddings", "32"], "64 is longer than", "32"),
    (["run.yaml", "--data.mock"], "data.mock and data.data_path are set", "leave out all but one"),
    (["run.yaml", "--data.split", "a,b"], "split 'a,b' is not one to three numbers", "99,1,0"),
    (["run.yaml", "--data.split", "0,0,0"], "split '0,0,0'", "sum above 0"),
    (["run.yaml", "--data.split", "1,-1"], "split '1,-1'"),
    (["run.yaml", "--data.split", "1,nan"], "split '1,nan'"),
    (["run.yaml", "--data.data_path", "0.7 data 0.3"], "data_path '0.7 data 0.3' is neither"),
    (["run.yaml", "--data.data_path", "-1 data"], "weight '-1' is not a number above 0"),
    (["run.yaml", "--optim.lr_warmup_iters", "9"], "warm-up (9 iters) must be shorter than", "(2 iters)"),
    (["run.yaml", "--optim.min_lr", "1"], "optim.min_lr (1.0) is above optim.lr (0.01)"),
    (["run.yaml", "--optim.lr_decay_style", "WSD"], "lr_wsd_decay_iters is not set"),
    (["run.yaml", "--train.precision", "fp16", "--optim.min_loss_scale", "1e20"], "lower optim.min_loss_scale"),
    (["run.yaml", "--optim.adam_beta1", "1.0"], "adam_beta1 is 1.0"),
    (["run.yaml", "--parallel.tensor_model_parallel_size", "2"], "world size 1", "tensor (2)"),
    (["run.yaml", "--parallel.recompute_method", "block"], "recompute_granularity full, which is not set"),
    (["run.yaml", "--runtime.device", "tpu"], "device 'tpu' is not known; use auto, cpu, cuda"),
    (["run.yaml", "--runtime.device", "cuda:99"], "cuda:99"),
    (["run.yaml", "--data.tokenizer_type", "BertTokenizer"], "data.tokenizer_type is 'BertTokenizer'"),
    (["run.yaml", "--data.tokenizer_type", "null", "--data.tokenizer_model", "x"], "tokenizer_type, which is not set"),
    (["run.yaml", "--data.tokenizer_type", "null"], "model.vocab_size is not set, and there is no tokenizer"),
    (["run.yaml", "--data.tokenizer_type", "NullTokenizer"], "NullTokenizer has vocab_size None"),
    (["run.yaml", "--model.vocab_size", "100"], "tokenizer has 257 entries, but model.vocab_size is 100"),
    (["run.yaml", "--data.reset_attention_mask", "--data.tokenizer_type", "null", "--model.vocab_size", "300"],
     "reset_attention_mask", "no end-of-document token"),
    (["run.yaml", "--train.output_dir", "data.bin"], "data.bin"),
    (["run.yaml", "--train.output_dir", "data.bin/run"], "output folder data.bin/run cannot be written"),
    (["run.yaml", "--train.output_dir", "/proc/run"], "output folder /proc/run cannot be written"),
    (["run.yaml", "--train.output_dir", "~/run"], "train.output_dir is '~/run'", "write the full path"),
    (["run.yaml", "--train.output_dir", "${HOME}/run"], "train.output_dir is '${HOME}/run'", "are not expanded"),
    (["run.yaml", "--nproc", "0"], "nproc"),
    (["run.yaml", "--nproc", "three"], "argument --nproc: invalid int value: 'three'"),
    (["run.yaml", "--nproc", "3"], "(2) is not a multiple of micro_batch_size (1) × data parallel (3)"),
    (["run.yaml", "--nproc", "2", "--runtime.device", "cuda"], "cuda"),
    (["run.yaml", "--nnodes", "2", "--nproc", "2"], "which needs --rdzv-endpoint"),
    (["run.yaml", "--nnodes", "2:3", "--nproc", "2", "--rdzv-endpoint", "a:1",
      "--parallel.tensor_model_parallel_size", "5"], "world size 4 is not divisible by tensor (5)"),
]  # fmt: skip


@pytest.mark.parametrize("case", CONFIGURATIONS, ids=[" ".join(case[0])[:50] for case in CONFIGURATIONS])
def test_a_configuration_that_is_not_possible(refused, case):
    words, *parts = case
    refused(["train", *words], CONFIG, *parts)


@pytest.mark.fault(24)
def test_a_run_file_that_runs_code_or_expands_is_refused(refused, place):
    attack = "train: !!python/object/apply:os.system ['touch PWNED']\n"
    (place / "attack.yaml").write_text(attack)
    refused(["train", "attack.yaml"], CONFIG, "not valid YAML", "python/object/apply")
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    (place / "bomb.yaml").write_text(bomb)
    refused(["train", "bomb.yaml"], CONFIG, "more than 100000 values")


def test_missing_data(refused, place):
    (place / "data.bin").unlink()
    refused(["train", "run.yaml"], DATA, "data.bin")
    (place / "data.idx").unlink()
    refused(["train", "run.yaml"], DATA, "data.idx")
    refused(["train", "run.yaml", "--data.data_path", "nothing"], DATA, "nothing.idx")


def test_truncated_data(refused, place):
    content = (place / "data.bin").read_bytes()
    (place / "data.bin").write_bytes(content[: len(content) // 2])
    refused(["train", "run.yaml"], DATA, "data.bin", str(len(content) // 2))
    (place / "data.bin").write_bytes(content)
    index = (place / "data.idx").read_bytes()
    for cut in (0, 5, 20, 40, len(index) - 1):
        (place / "data.idx").write_bytes(index[:cut])
        refused(["train", "run.yaml"], DATA, "data.idx")


def test_an_index_that_is_no_index(refused, place):
    index = (place / "data.idx").read_bytes()
    (place / "data.idx").write_bytes(b"NOTMEGATRON" + index[11:])
    refused(["train", "run.yaml"], DATA, "data.idx", "MMIDIDX")


def write_dataset(prefix: Path, documents: list[list[int]]) -> None:
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for document in documents:
            writer.add_documents(np.array(document, np.uint16), np.array([len(document)]))


@pytest.mark.fault(20)
def test_a_token_beyond_the_vocabulary(place, capsys):
    write_dataset(place / "wide", [[5] * 40, [6] * 20 + [300] + [7] * 20, [8] * 400])
    code = main(
        ["train", "run.yaml", "--data.data_path", "wide", "--data.split", "1", "--train.train_iters", "40"]
    )
    err = capsys.readouterr().err
    assert code == DATA and err.startswith("error: sample ") and err.count("\n") == 1
    assert "wide has token id 300" in err and "the vocabulary has 257" in err and "tokenizer" in err
    assert not (place / "run" / "checkpoints").exists()


def test_empty_documents_are_passed_over(place):
    write_dataset(place / "holes", [[], [5] * 300, [], [], [6] * 300, []])
    assert main(["train", "run.yaml", "--data.data_path", "holes", "--data.split", "1"]) == 0


@pytest.mark.timeout(60)
def test_a_split_left_with_no_documents_or_too_few_tokens(refused, place):
    write_dataset(place / "one", [[5] * 300])
    refused(
        ["train", "run.yaml", "--data.data_path", "one"],
        DATA,
        "valid data (split 80,20)",
        "0 documents",
        "share",
    )
    refused(
        ["train", "run.yaml", "--data.data_path", "one", "--data.split", "0,1"],
        DATA,
        "train data",
        "0 documents",
    )
    write_dataset(place / "none", [[], []])
    refused(["train", "run.yaml", "--data.data_path", "none", "--data.split", "1"], DATA, "0 tokens", "17")


def test_an_output_folder_that_holds_another_run(refused, place):
    assert main(["train", "run.yaml"]) == 0
    refused(["train", "run.yaml"], CONFIG, "output folder run holds another run", "checkpoint.load to run")
    refused(["train", "run.yaml", "--checkpoint.load", "elsewhere"], CONFIG, "holds another run", "elsewhere")


@pytest.mark.fault(25)
def test_an_output_folder_that_another_job_is_using(refused, place):
    with OutputLock(place / "run"):
        refused(["train", "run.yaml"], CONFIG, "in use by process", str(os.getpid()), "train.output_dir")


def test_a_load_path_without_a_checkpoint(refused):
    refused(["train", "run.yaml", "--checkpoint.load", "elsewhere"], CHECKPOINT, "no checkpoint in elsewhere")
    step = "run/checkpoints/step_00000007"
    refused(["train", "run.yaml", "--checkpoint.load", step], CHECKPOINT, "there is no checkpoint", step)


def test_a_checkpoint_of_another_shape_or_tokenizer(refused, place):
    assert main(["train", "run.yaml"]) == 0
    load = ["train", "run.yaml", "--checkpoint.load", "run", "--train.output_dir", "other"]
    refused([*load, "--model.ffn_hidden_size", "64"], CHECKPOINT, "model.ffn_hidden_size was 128 and is 64")
    refused(
        [*load, "--model.num_attention_heads", "4"], CHECKPOINT, "model.num_attention_heads was 2 and is 4"
    )
    null = ["--data.tokenizer_type", "NullTokenizer", "--model.vocab_size", "257"]
    refused(
        [*load, *null],
        CHECKPOINT,
        "trained with another tokenizer (257 entries",
        "run/checkpoints/step_00000002",
    )


def test_a_damaged_checkpoint(refused, place):
    assert main(["train", "run.yaml"]) == 0
    weights = place / "run" / "checkpoints" / "step_00000002" / "model-00000-000.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    damaged = (
        "no checkpoint in run/checkpoints is intact",
        "model-00000-000.safetensors is damaged",
        "SHA-256",
    )
    refused(
        ["train", "run.yaml", "--checkpoint.load", "run", "--train.output_dir", "other"],
        CHECKPOINT,
        *damaged,
        by_ranks_alone=True,  # the launcher reads no weights
    )
    refused(["generate", "run", "--prompt", "a"], CHECKPOINT, *damaged)


def test_a_tokenizer_in_the_checkpoint_that_was_changed(refused, place):
    assert main(["train", "run.yaml"]) == 0
    spec = place / "run" / "checkpoints" / "step_00000002" / "tokenizer" / "megalith_tokenizer.json"
    spec.write_text(spec.read_text().replace("ByteTokenizer", "NullTokenizer"))
    refused(["generate", "run", "--prompt", "a"], CHECKPOINT, "megalith_tokenizer.json is damaged")


def test_requests_to_generate_that_cannot_be(refused, place):
    assert main(["train", "run.yaml"]) == 0
    refused(["generate", "nowhere", "--prompt", "a"], CHECKPOINT, "there is no checkpoint in nowhere")
    refused(["generate", "data.bin", "--prompt", "a"], CHECKPOINT, "data.bin is a file")
    refused(["generate", "run"], CONFIG, "there is no prompt; pass --prompt")
    refused(["generate", "run", "--prompt", ""], CONFIG, "prompt 0 has no tokens")
    refused(["generate", "run", "--prompt", "abc"], CONFIG, "3 tokens and up to 128 follow", "16 positions")
    refused(["generate", "run", "--prompt", "a", "--top-p", "2"], CONFIG, "top_p is 2.0")
    refused(
        ["generate", "run", "--prompt", "a", "--seed", "-1", "--max-new-tokens", "2"], CONFIG, "seed is -1"
    )
    refused(
        ["generate", "run", "--prompt-file", "nowhere.txt"], DATA, "prompts cannot be read", "nowhere.txt"
    )
    (place / "latin.txt").write_bytes(b"caf\xe9")
    refused(["generate", "run", "--prompt-file", "latin.txt"], DATA, "prompts cannot be read", "UTF-8")
    for line in (
        '{"prompt": "x", "ans',
        "[1]",
        '{"prompt": 5}',
        '{"question": "x"}',
        '{"prompt": "\\ud800"}',
    ):
        (place / "p.jsonl").write_text('{"prompt": "a\u2028b"}\n\n' + line, encoding="utf-8")
        refused(
            ["generate", "run", "--prompt-file", "p.jsonl"],
            DATA,
            'p.jsonl line 3 is not an object with a text "prompt"',
        )
    (place / "p.txt").write_text("a\n\nb\n")
    refused(["generate", "run", "--prompt-file", "p.txt"], DATA, "p.txt line 2 is empty")
    alone = ["generate", "run", "--prompt", "a"]
    refused([*alone, "--num-generations", "0"], CONFIG, "--num-generations is 0; it must be at least 1")
    refused([*alone, "--tensor-model-parallel-size", "2"], CONFIG, "there is one process", "--nproc 2")
    rollout = ["rollout", "run", "p.jsonl", "--reward", "length"]
    for option in ("--limit", "--num-generations", "--rows"):
        refused([*rollout, option, "0"], CONFIG, f"{option} is 0; it must be at least 1")


def test_a_run_without_a_tokenizer_generates_text_only_with_one_that_fits_it(refused, capsys):
    words = ["--data.data_path", "null", "--data.mock", "true", "--data.tokenizer_type", "null"]
    for folder, size in (("run", "257"), ("small", "256")):
        assert (
            main(["train", "run.yaml", *words, "--model.vocab_size", size, "--train.output_dir", folder]) == 0
        )
    refused(["generate", "run", "--prompt", "a"], CONFIG, "run has no tokenizer", "--tokenizer-type")
    named = ["--prompt", "a", "--max-new-tokens", "2", "--tokenizer-type", "ByteTokenizer"]
    refused(["generate", "small", *named], CONFIG, "the tokenizer has 257 entries and the model 256")
    capsys.readouterr()
    assert main(["generate", "run", *named]) == 0
    assert capsys.readouterr().out.startswith("a")


def test_requests_to_show_data_that_cannot_be(refused):
    show = ["data", "show", "data", "--seq-length", 16, "--num-samples", 5]
    refused([*show, "--index", 10**6], DATA, "sample 1000000 is not one of the", "train samples; choose 0 to")
    refused([*show, "--index", "-1"], DATA, "sample -1")
    refused([*show, "--position", "-1"], DATA, "position -1 is before the first one; positions")
    refused([*show, "--position", "x"], CONFIG, "--position is 'x'")
    refused([*show, "--index", "x"], CONFIG, "--index is 'x'")
    refused([*show, "--split", "1,1,1,1"], CONFIG, "split '1,1,1,1'")
    refused([*show, "--seed", "-1"], CONFIG, "--seed is -1")
    refused([*show, "--seed", 2**32], CONFIG, "--seed is 4294967296")
    refused(["data", "show", "nothing", *show[3:]], DATA, "nothing.idx")
    refused(["data", "show", "data", "--seq-length", 0, "--num-samples", 5], CONFIG, "seq_length 0")
    refused(["data", "show", "data", "--seq-length", 10**6, "--num-samples", 5], DATA, "1000001", "tokens")


def test_requests_to_plot_that_cannot_be(refused, place):
    refused(["plot", "nowhere"], DATA, "nowhere")
    refused(["plot", ".", "--text"], DATA, "metrics.jsonl")
    assert main(["train", "run.yaml"]) == 0
    refused(["plot", "run", "--output", "data.bin/loss.png"], DATA, "data.bin/loss.png cannot be written")
    with open("run/metrics.jsonl", "a") as file:
        file.write("not json\n{}\n")
    refused(["plot", "run"], DATA, "run/metrics.jsonl, line 3 is not a JSON object")


BYTES = ["--tokenizer-type", "ByteTokenizer", "--workers", 0]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut', "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"body": "x"}', "no key 'text'"),
        (b'{"text": 5}', "is a number, not a string"),
        (b'{"text": "\xff"}', "not UTF-8: byte 0xff"),
        (b'{"text": "\\ud800"}', "surrogate"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line_or_skipped(refused, place, line, reason):
    (place / "bad.jsonl").write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "good too"}\n')
    words = ["preprocess", "--input", "bad.jsonl", "--output-prefix", "out", *BYTES]
    refused(words, DATA, "bad.jsonl line 2 (byte 17)", reason, "skip")
    assert main([str(word) for word in [*words, "--on-error", "skip"]]) == 0
    assert (place / "out_text_document.idx").exists()


def test_requests_to_preprocess_that_cannot_be(refused, place):
    (place / "good.jsonl").write_text(json.dumps({"text": "good"}) + "\n")
    words = ["preprocess", "--input", "good.jsonl", "--output-prefix"]
    refused(
        ["preprocess", "--input", "nothing*.jsonl", "--output-prefix", "out", *BYTES], DATA, "nothing*.jsonl"
    )
    refused([*words, "out", "--tokenizer-type", "Bert"], CONFIG, "tokenizer_type 'Bert' is unknown")
    missing = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "nowhere/tokenizer.json"]
    refused([*words, "out", *missing], DATA, "nowhere/tokenizer.json")
    refused([*words, "data.bin/out", *BYTES], DATA, "data.bin/out")
    assert main([str(word) for word in [*words, "out", *BYTES]]) == 0
    refused([*words, "out", *BYTES], DATA, "out_text_document.bin already exists", "another output prefix")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "exit_code", "part"),
    [
        (["train", "run.yaml", "--train.train_iter", "5"], CONFIG, "did you mean train.train_iters"),
        (["train", "run.yaml", "--data.data_path", "nothing"], DATA, "nothing.idx"),
        (["generate", "nowhere", "--prompt", "a"], CHECKPOINT, "there is no checkpoint in nowhere"),
    ],
)
def test_a_real_process_ends_with_the_code_and_the_sentence(place, words, exit_code, part):
    before = contents(place)
    done = forked.run(["-m", "megalith", *words])
    assert done.returncode == exit_code
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and part in done.stderr
    assert contents(place) == before
