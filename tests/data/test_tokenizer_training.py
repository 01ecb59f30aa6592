"""Training a tokenizer: what it writes, that it is deterministic, and what it refuses."""

import gzip
import json

import pytest
import transformers

from megalith.data.tokenizers.open_tokenizer import build_tokenizer
from megalith.data.tokenizers.train_tokenizer import train_tokenizer
from megalith.errors import ConfigError, DataError

TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom…\n\n\tdef f(x): return x"
)


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": TEXT, "title": "times " * 5}) + "\n" for _ in range(10)))
    return path


def test_transformers_loads_the_folder_with_its_end_of_text(jsonl, tmp_path):
    summary = train_tokenizer([jsonl], 300, tmp_path / "out")
    assert summary.path == tmp_path / "out" / "tokenizer.json"
    assert (summary.vocab_size, summary.documents) == (300, 10)
    assert summary.bytes == 10 * len(TEXT.encode())
    ours = build_tokenizer("HuggingFaceTokenizer", tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    assert theirs.eos_token == "<|endoftext|>"
    assert theirs.eos_token_id == ours.eod
    assert theirs.encode(TEXT, add_special_tokens=False) == ours.encode(TEXT)
    assert ours.decode(ours.encode(TEXT)) == TEXT


def test_any_text_can_be_encoded_even_bytes_never_seen(jsonl, tmp_path):
    train_tokenizer([jsonl], 257, tmp_path / "out")
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tmp_path / "out")
    text = "".join(map(chr, range(0x250))) + "🦊"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_same_text_gives_the_same_bytes(jsonl, tmp_path):
    zipped = tmp_path / "text.jsonl.gz"
    zipped.write_bytes(gzip.compress(jsonl.read_bytes()))
    for i, source in enumerate([jsonl, jsonl, zipped]):
        train_tokenizer([source], 320, tmp_path / f"{i}.json")
    assert (tmp_path / "0.json").read_bytes() == (tmp_path / "1.json").read_bytes()
    assert (tmp_path / "0.json").read_bytes() == (tmp_path / "2.json").read_bytes()
    assert not (tmp_path / "tokenizer_config.json").exists()


def test_every_json_key_is_learned_from(jsonl, tmp_path):
    train_tokenizer([jsonl], 330, tmp_path / "both.json", json_keys=("text", "title"))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tmp_path / "both.json")
    assert len(tokenizer.encode(" times times")) == 2


def test_too_little_text_gives_a_smaller_vocabulary_and_says_so(jsonl, tmp_path):
    summary = train_tokenizer([jsonl], 5000, tmp_path / "out")
    assert 257 < summary.vocab_size < 5000
    assert build_tokenizer("HuggingFaceTokenizer", tmp_path / "out").vocab_size == summary.vocab_size


def test_a_vocabulary_that_cannot_hold_the_bytes_is_refused(jsonl, tmp_path):
    with pytest.raises(ConfigError, match="choose at least 257"):
        train_tokenizer([jsonl], 256, tmp_path / "out")


def test_bad_input_is_refused_and_nothing_is_written(jsonl, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"text": 3}\n')
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"text": ""}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl line 2 \(byte 17\)"):
        train_tokenizer([bad], 300, tmp_path / "out")
    with pytest.raises(DataError, match="no text was found"):
        train_tokenizer([empty], 300, tmp_path / "out")
    with pytest.raises(DataError, match="no file matches"):
        train_tokenizer([tmp_path / "none*.jsonl"], 300, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_existing_tokenizer_is_not_overwritten_unless_asked(jsonl, tmp_path):
    train_tokenizer([jsonl], 270, tmp_path / "out")
    with pytest.raises(DataError, match="already exists"):
        train_tokenizer([jsonl], 280, tmp_path / "out")
    assert train_tokenizer([jsonl], 280, tmp_path / "out", overwrite=True).vocab_size == 280
