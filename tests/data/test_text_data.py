"""A run on text reads the samples of preprocessed data, token for token, and resumes bitwise."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from trained_runs import comparable, configuration, stored

import megalith
from megalith.data.preprocessing.preprocess import preprocess
from megalith.data.text_data import is_text, with_tokenized_text
from megalith.data.tokenizers.open_tokenizer import build_tokenizer
from megalith.errors import ConfigError, DataError
from megalith.training.build import open_datasets, prepare
from megalith.training.precheck import check_job

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "dog"]
TEXTS = [" ".join(WORDS[(i * j + j) % 10] for j in range(1, 12 + i % 9)) for i in range(60)]


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """Write TEXTS in two folders, a/*.jsonl and b/*.txt, and work next to them."""
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        Path(folder).mkdir()
    for number in range(3):
        part = TEXTS[number * 20 : number * 20 + 20]
        Path(f"a/{number}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in part))
        Path(f"b/{number}.txt").write_text("\n\n".join(part))
    yield tmp_path
    torch.use_deterministic_algorithms(False)


def text_configuration(folder, path, data=None, **sections):
    data = dict(split="80,20,0", text_documents="block") | (data or {})
    return configuration(path, folder, data=data, **sections)


@pytest.mark.parametrize(
    ("path", "inputs"),
    [
        (["a/*.jsonl"], [["a/0.jsonl", "a/1.jsonl", "a/2.jsonl"]]),
        ([0.7, "a", 0.3, "b/[01].txt"], [["a"], ["b/0.txt", "b/1.txt"]]),
    ],
)
def test_the_samples_of_text_are_those_of_preprocessed_data(texts, path, inputs):
    tokenizer = build_tokenizer("ByteTokenizer")
    prefixes = iter(
        preprocess(
            names, f"made/{number}", tokenizer, append_eod=True, workers=0, text_documents="block",
            show_progress=False,
        ).prefixes[0]
        for number, names in enumerate(inputs)
    )  # fmt: skip
    made = [part if isinstance(part, float) else next(prefixes) for part in path]
    of_text, of_bin = (
        open_datasets(prepare(text_configuration("run", p), 1).config, (300, 20, 0), tokenizer)
        for p in (path, made)
    )
    for ours, theirs in zip(of_text[:2], of_bin[:2], strict=True):
        assert len(ours) == len(theirs) >= 20
        assert all(np.array_equal(ours[i], theirs[i]) for i in range(len(ours)))


def test_a_run_on_text_equals_one_on_preprocessed_data_and_resumes_bitwise(texts, capsys):
    fixed = dict(train=dict(deterministic=True))
    result = megalith.train(text_configuration("text", ["b"], **fixed))
    assert "b: 60 documents" in capsys.readouterr().out
    tokenizer = build_tokenizer("ByteTokenizer")
    preprocess(
        ["b"], "made", tokenizer, append_eod=True, text_documents="block", workers=0, show_progress=False
    )
    megalith.train(text_configuration("bin", "made_text_document", **fixed))
    assert comparable(Path("text")) == comparable(Path("bin"))
    for name, stop in (("first", dict(exit_interval=3)), ("moved", {})):
        resumed = megalith.train(
            text_configuration(
                name, ["b"], checkpoint=dict(load="first"), train=dict(deterministic=True, **stop)
            )
        )
    assert stored(Path(resumed.checkpoint)) == stored(Path(result.checkpoint))
    assert comparable(Path("moved")) == comparable(Path("text"))[3:]
    assert "samples may differ" not in capsys.readouterr().out


def tokenized(folder="cache", may_write=True, path=("b",), **data):
    config = text_configuration("run", list(path), data)
    tokenizer = build_tokenizer("ByteTokenizer")
    return with_tokenized_text(config.data, False, tokenizer, Path(folder), may_write)


def test_the_cache_is_reused_until_text_or_settings_change(texts):
    with pytest.raises(DataError, match="has not been tokenized"):
        tokenized(may_write=False)
    data, notes = tokenized()
    [prefix] = data.data_path
    written = os.stat(f"{prefix}.bin")
    assert tokenized(may_write=False) == (data, notes) and os.stat(f"{prefix}.bin") == written
    assert tokenized(append_eod=False)[0].data_path != [prefix]
    Path("b/3.txt").write_text("one more")
    again, notes = tokenized()
    assert again.data_path == [prefix] and notes[0].startswith("b: 61 documents")
    assert os.stat(f"{prefix}.bin").st_size > written.st_size
    Path("b/4.txt").write_bytes(b"fine\n\n\xff\n\nfine\n\n")
    with pytest.raises(DataError, match=r"b/4.txt line 3 \(byte 6\) is unusable: not UTF-8"):
        tokenized()
    assert any("1 unusable document skipped" in note for note in tokenized(skip_bad_documents=True)[1])


def test_bad_text_names_the_settings_of_a_run_and_is_skipped_also_at_the_start(texts):
    """Where `megalith preprocess` names its own options."""
    Path("bad.jsonl").write_bytes(
        b'{"text": "caf\xe9"}\n' + Path("a/0.jsonl").read_bytes() + b'{"text": 5}\n'
    )
    Path("number.jsonl").write_text('{"text": 5}\n')
    Path("empty.jsonl").write_text("")
    for path, message in (
        ("bad.jsonl", r"bad.jsonl line 1 \(byte 0\) .* correct or remove it, or set data.skip_bad_documents"),
        (
            "number.jsonl",
            "its 'text' is a number, not a string; correct or remove it, or set data.skip_bad_documents",
        ),
        (
            "empty.jsonl",
            "empty.jsonl has no document with a token under the key 'text' .* or set data.text_key",
        ),
    ):
        with pytest.raises(DataError, match=message):
            tokenized(path=[path])
    _, notes = tokenized(path=["bad.jsonl"], skip_bad_documents=True)
    assert "bad.jsonl: 20 documents" in notes[0] and "bad.jsonl: 2 unusable documents skipped" in notes[1]


def test_text_that_changes_before_a_resume_is_noted(texts, capsys):
    for steps, extra in ((3, None), (8, "more text, which changes the samples")):
        if extra:
            Path("b/3.txt").write_text(extra)
        megalith.train(
            text_configuration(
                "run", ["b"], checkpoint=dict(load="run"), train=dict(train_iters=8, exit_interval=steps)
            )
        )
    assert "samples may differ from those that the run of run/checkpoints" in capsys.readouterr().out.replace(
        "\n", " "
    )


def test_the_check_before_the_start_tokenizes_text_or_names_the_mistake(texts):
    check_job(text_configuration("run", ["b"]), [1], 1, True)
    assert list(Path("run/cache").glob("text-*_text_document.idx"))
    for path, data, error, message in (
        (["b"], dict(tokenizer_type=None), ConfigError, "data.tokenizer_type is not set"),
        (["none/*.txt"], {}, DataError, "no file matches"),
        (["hf://json?streaming=maybe"], {}, ConfigError, "write true or false"),
        (["chat.jsonl"], {}, DataError, "`megalith sft` trains on"),
    ):
        Path("chat.jsonl").write_text('{"messages": []}\n')
        with pytest.raises(error, match=message):
            model = dict(vocab_size=300) if data else {}
            check_job(text_configuration("other", path, data, model=model), [1], 1, True)


def test_prefixes_of_indexed_datasets_are_no_text(texts, corpus):
    assert not is_text(corpus) and not is_text("missing/books_text_document")
    assert all(map(is_text, ("a", "a/0.jsonl", "a/*.jsonl", "b.txt.gz", "hf://owner/name")))
