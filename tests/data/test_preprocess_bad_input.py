"""Every bad input of preprocess: a sentence that names the place, and nothing half written."""

import json

import pytest

from megalith.data.indexed import IndexedDataset
from megalith.data.preprocessing.preprocess import preprocess
from megalith.data.tokenizers.open_tokenizer import build_tokenizer
from megalith.errors import ConfigError, DataError

BYTES = build_tokenizer("ByteTokenizer")


@pytest.fixture
def run(tmp_path):
    (tmp_path / "outputs").mkdir()

    def run(inputs, tokenizer=BYTES, **options):
        options = {"workers": 0, "show_progress": False, **options}
        return preprocess(inputs, tmp_path / "outputs" / "out", tokenizer, **options)

    run.outputs = tmp_path / "outputs"
    return run


def write(path, *lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return path


@pytest.mark.parametrize("workers", [0, 1])
def test_the_first_bad_line_stops_the_run_and_leaves_nothing(run, tmp_path, workers):
    good = write(tmp_path / "good.jsonl", *['{"text": "fine"}'] * 30_000)
    bad = write(tmp_path / "bad.jsonl", '{"text": "fine"}', "", '{"text": "cut', '{"text": 3}')
    with pytest.raises(
        DataError, match=r"bad\.jsonl line 3 \(byte 18\) is unusable: not JSON.*on_error to skip"
    ):
        run([good, bad], workers=workers)
    assert list(run.outputs.iterdir()) == []


def test_skipped_lines_are_counted_and_named_and_the_rest_is_written(run, tmp_path):
    lines = [
        '{"text": "a"}',
        "[]",
        b'{"text": "\xff"}',
        '{"text": "b"}',
        '{"no": 1}',
        '{"text": "' + "x" * 300 + '"}',
    ]
    source = write(tmp_path / "a.jsonl", *lines, *["{"] * 40, '{"text": "c"}')
    summary = run([source], on_error="skip", max_line_bytes=200)
    assert (summary.documents, summary.skipped) == ([3], 44)
    assert [bad.line for bad in summary.bad_lines] == [2, 3, 5, 6, *range(7, 23)]
    dataset = IndexedDataset(summary.prefixes[0])
    assert [bytes(dataset.get(i).astype("u1")) for i in range(3)] == [b"a", b"b", b"c"]


def test_a_text_that_the_tokenizer_refuses_is_a_bad_line(run, tmp_path):
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=10)
    source = write(
        tmp_path / "a.jsonl", '{"text": "1 2"}', '{"text": "3 99"}', "{", '{"text": "4"}', '{"text": "x"}'
    )
    with pytest.raises(DataError, match=r"line 2 \(byte 16\) is unusable: token id 99 is not in \[0, 11\)"):
        run([source], tokenizer)
    summary = run([source], tokenizer, on_error="skip")
    assert [bad.line for bad in summary.bad_lines] == [2, 3, 5]
    assert (summary.documents, summary.tokens) == ([2], 3)


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n{"text": ""}\n'])
def test_an_input_without_any_token_is_an_error(run, tmp_path, content):
    source = tmp_path / "a.jsonl"
    source.write_text(content)
    with pytest.raises(DataError, match=r"no document of .*\.jsonl has any token under the key 'text'"):
        run([source], append_eod=True)
    assert list(run.outputs.iterdir()) == []


def test_a_key_without_any_token_is_an_error_even_when_another_has_some(run, tmp_path):
    source = write(tmp_path / "a.jsonl", json.dumps({"text": "a", "title": ""}))
    with pytest.raises(DataError, match="under the key 'title'"):
        run([source], json_keys=["text", "title"])
    assert list(run.outputs.iterdir()) == []


def test_existing_outputs_are_kept_unless_overwritten(run, tmp_path):
    source = write(tmp_path / "a.jsonl", '{"text": "first"}')
    run([source])
    before = (run.outputs / "out_text_document.bin").read_bytes()
    write(tmp_path / "a.jsonl", '{"text": "second"}')
    with pytest.raises(DataError, match="already exists"):
        run([source])
    assert (run.outputs / "out_text_document.bin").read_bytes() == before
    run([source], overwrite=True)
    assert (run.outputs / "out_text_document.bin").read_bytes() != before


def test_a_tokenizer_that_gives_ids_beyond_its_vocabulary_is_refused(run, tmp_path):
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    tokenizer.vocab_size = 50
    tokenizer.encode = lambda text: [70]
    with pytest.raises(DataError, match="returned ids 70 to 70, but its vocab_size is 50"):
        run([write(tmp_path / "a.jsonl", '{"text": "1"}')], tokenizer)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"json_keys": []}, "json_keys"),
        ({"json_keys": "text"}, "json_keys"),
        ({"json_keys": ["text", "text"]}, "different keys"),
        ({"json_keys": ["a/b"]}, "path separator"),
        ({"on_error": "ignore"}, "choose stop or skip"),
        ({"workers": -1}, "workers is -1"),
        ({"max_line_bytes": 0}, "max_line_bytes is 0"),
    ],
)
def test_impossible_arguments_are_refused(run, tmp_path, options, reason):
    source = write(tmp_path / "a.jsonl", '{"text": "a"}')
    with pytest.raises(ConfigError, match=reason):
        run([source], **options)


def test_append_eod_needs_a_tokenizer_that_has_one(run, tmp_path):
    tokenizer = build_tokenizer("ByteTokenizer")
    tokenizer.eod = None
    with pytest.raises(ConfigError, match="has no end-of-document token"):
        run([write(tmp_path / "a.jsonl", '{"text": "a"}')], tokenizer, append_eod=True)
