"""The command line from corpus to dataset, and the progress display."""

import argparse
import json
import re
import subprocess
import sys

import pytest
from bos_tokenizer import bos_tokenizer

from megalith.cli import datasets as commands
from megalith.data.indexed import IndexedDataset
from megalith.data.tokenizers.open_tokenizer import build_tokenizer
from megalith.errors import MegalithError


def run(name, *arguments):
    add_arguments, run_command = {
        "corpus": (commands.add_corpus_arguments, commands.run_corpus),
        "tokenizer train": (commands.add_tokenizer_train_arguments, commands.run_tokenizer_train),
        "preprocess": (commands.add_preprocess_arguments, commands.run_preprocess),
    }[name]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run_command(parser.parse_args([str(argument) for argument in arguments]))


@pytest.mark.full
def test_from_corpus_to_dataset(tmp_path, capsys):
    assert run("corpus", "--output", tmp_path / "corpus.jsonl") == 0
    lines = (tmp_path / "corpus.jsonl").read_text(encoding="utf-8").splitlines()[:40]
    (tmp_path / "few.jsonl").write_text("\n".join(lines), encoding="utf-8")
    few = tmp_path / "few.jsonl"
    assert run("tokenizer train", "--input", few, "--vocab-size", "500", "--output", tmp_path / "tok") == 0
    kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tmp_path / "tok"]
    out = tmp_path / "data" / "few"
    assert (
        run("preprocess", "--input", few, "--output-prefix", out, *kind, "--append-eod", "--workers", 1) == 0
    )
    dataset = IndexedDataset(f"{out}_text_document")
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tmp_path / "tok")
    first = json.loads(lines[0])["text"]
    assert tokenizer.decode(dataset.get(0).tolist()) == first + "<|endoftext|>"
    output = capsys.readouterr().out
    assert "trained 500 entries on 40 documents" in output
    assert "40 documents | " in output
    assert f"wrote {out}_text_document.bin and .idx" in output


def test_skipped_lines_and_empty_documents_are_reported(tmp_path, capsys):
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "a"}\n' + "{\n" * 25 + '{"text": ""}\n')
    kind = ["--tokenizer-type", "ByteTokenizer", "--workers", 0, "--on-error", "skip"]
    assert run("preprocess", "--input", source, "--output-prefix", tmp_path / "out", *kind) == 0
    output = capsys.readouterr().out
    assert f"skipped {source} line 2 (byte 14) is unusable: not JSON" in output
    assert "skipped 5 more unusable lines" in output
    assert "skipped 25 unusable lines and 1 empty documents" in output


def test_special_tokens_are_added_where_asked_for(tmp_path):
    bos_tokenizer(tmp_path / "tokenizer", "")
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n')
    kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tmp_path / "tokenizer"]
    for more, begin in ([], []), (["--add-special-tokens"], [256]):
        words = ["--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "out", *kind, "--workers", 0]
        assert run("preprocess", *words, "--append-eod", "--overwrite", *more) == 0
        ids = IndexedDataset(tmp_path / "out_text_document").get(0).tolist()
        assert ids[: len(begin)] == begin and len(ids) == len(begin) + 3 and ids[-1] == 257


def test_a_vocabulary_that_could_not_be_filled_is_reported(tmp_path, capsys):
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "abcabc"}\n')
    arguments = ["--input", source, "--vocab-size", 1000, "--output", tmp_path / "tok.json"]
    assert run("tokenizer train", *arguments) == 0
    assert "fewer than the requested 1,000" in capsys.readouterr().out


def test_importing_the_commands_is_cheap():
    code = "import sys, megalith.cli.datasets; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "numpy", "tokenizers"} & set(output.split())


def test_a_dataset_of_the_hub_is_written_as_json_lines_and_encoded(tmp_path, monkeypatch):
    from datasets import Dataset

    def load_dataset(name, split, streaming):
        if split != "train":
            raise ValueError(f"Unknown split \"{split}\". Should be one of ['train'].")
        return Dataset.from_list([{"text": "5 6", "id": 0}, {"text": "7", "id": 1}])

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    kind = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 9, "--workers", 0)
    out = ("--output-prefix", tmp_path / "out")
    assert run("preprocess", "--dataset", "some/set", *out, *kind) == 0
    assert (tmp_path / "out.jsonl").read_text() == '{"text": "5 6"}\n{"text": "7"}\n'
    assert IndexedDataset(tmp_path / "out_text_document").get(0).tolist() == [5, 6]
    for arguments, told in (
        (("--dataset", "some/set:train"), "out.jsonl already exists"),
        (("--dataset", "some/set:test", "--overwrite"), "Unknown split"),
        (
            ("--dataset", "some/set", "--json-keys", "body", "--overwrite"),
            "has no column body; it has text, id",
        ),
        ((), "needs either --input FILE or --dataset"),
        (("--dataset", "no.parquet", "--overwrite"), "no file matches the input 'no.parquet'"),
    ):
        with pytest.raises(MegalithError, match=re.escape(told)):
            run("preprocess", *arguments, *out, *kind)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MegalithError, match=r"\[datasets\]"):
        run("preprocess", "--dataset", "some/set", "--overwrite", *out, *kind)


def test_a_parquet_file_is_encoded_as_its_rows(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    from pyarrow import table

    parquet.write_table(table({"body": ["5 6", "7"], "id": [0, 1]}), tmp_path / "rows.parquet")
    kind = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 9, "--workers", 0, "--json-keys", "body")
    out = ("--output-prefix", tmp_path / "out")
    assert run("preprocess", "--dataset", tmp_path / "rows.parquet", *out, *kind) == 0
    data = IndexedDataset(tmp_path / "out_body_document")
    assert [data.get(number).tolist() for number in range(2)] == [[5, 6], [7]]
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(MegalithError, match="cannot be read as parquet"):
        run("preprocess", "--dataset", tmp_path / "torn.parquet", "--overwrite", *out, *kind)
