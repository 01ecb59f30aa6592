"""`data stats` and `data plan` of streams: a sample of their documents, and what follows from it for the whole."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from megalith.cli.main import main
from megalith.data.length_statistics import length_statistics
from megalith.data.streams.lane import StreamSettings
from megalith.data.streams.stream_shards import list_shards
from megalith.data.streams.stream_statistics import DOCUMENTS, MAX_SHARDS, stream_statistics
from megalith.data.tokenizers.open_tokenizer import build_tokenizer

SEQ_LENGTH = 64


def texts_of(shards: int, documents: int) -> list[list[str]]:
    lengths = np.random.default_rng(3).integers(5, 200, (shards, documents))
    return [["x" * length for length in row] for row in lengths]


def write(texts: list[list[str]], ending: str = "jsonl") -> None:
    for number, shard in enumerate(texts):
        content = "".join(json.dumps({"text": text}) + "\n" for text in shard).encode()
        content = gzip.compress(content) if ending.endswith("gz") else content
        Path(f"{number:03d}.{ending}").write_bytes(content)


def settings(entry: str = "*.jsonl", **changes) -> StreamSettings:
    fixed = {"lanes": 2, "seq_length": SEQ_LENGTH, "seed": 1, "repeat": True, "shuffle_buffer": 10}
    tokenizer = build_tokenizer("ByteTokenizer")
    return StreamSettings(entry=entry, shards=list_shards(entry), tokenizer=tokenizer, **(fixed | changes))


def run_file(**data) -> str:
    fixed = {"seq_length": SEQ_LENGTH, "tokenizer_type": "ByteTokenizer", "num_workers": 0, "streaming": True}
    tree = {
        "model": {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2},
        "data": fixed | data,
        "optim": {"lr": 1e-3},
        "train": {"train_iters": 10, "micro_batch_size": 2, "global_batch_size": 4, "eval_iters": 0},
        "runtime": {"device": "cpu"},
    }
    Path("run.yaml").write_text(json.dumps(tree))
    return "run.yaml"


def printed(capsys, *words: str) -> str:
    capsys.readouterr()
    assert main(["data", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("append_eod", [True, False])
def test_the_statistics_of_a_small_stream_are_those_of_all_documents(append_eod):
    texts = texts_of(3, 20)
    texts[1][4] = ""
    write(texts)
    lengths = np.array([len(text) + append_eod for shard in texts for text in shard if text])
    about = stream_statistics(settings(append_eod=append_eod))
    assert about["documents"] == length_statistics(lengths)
    assert about["estimated_documents"] == 59 and about["estimated_tokens"] == lengths.sum()
    assert about["empty"] == 1 and about["unusable"] == 0 and about["sampled_shards"] == 3
    assert about["bytes"] == sum(path.stat().st_size for path in Path().glob("*.jsonl"))
    assert about["longer_documents"] == (lengths > SEQ_LENGTH).sum()


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_the_estimate_of_a_large_stream_is_close(ending):
    letters = np.random.default_rng(5).integers(97, 123, 1 << 20, dtype=np.uint8).tobytes().decode()
    starts = np.random.default_rng(6).integers(0, 1 << 19, (10, 500))
    texts = [[letters[at : at + 200 + at % 3600] for at in row] for row in starts.tolist()]
    write(texts, ending)
    tokens = sum(len(text) + 1 for shard in texts for text in shard)
    about = stream_statistics(settings(f"*.{ending}"))
    assert DOCUMENTS <= about["documents"]["count"] < 3000  # of 5,000
    assert about["estimated_tokens"] == pytest.approx(tokens, rel=0.1)
    assert about["estimated_documents"] == pytest.approx(5000, rel=0.1)


def test_a_sample_of_many_small_shards_stops(monkeypatch):
    write(texts_of(MAX_SHARDS + 10, 2))
    about = stream_statistics(settings())
    assert about["sampled_shards"] == MAX_SHARDS and about["documents"]["count"] == 2 * MAX_SHARDS


def test_statistics_and_plan_of_a_blend_with_a_stream(capsys):
    texts = texts_of(4, 30)
    write(texts)
    Path("000.jsonl").write_bytes(b"no json\n" + Path("000.jsonl").read_bytes())
    words = ["--input", "001.jsonl", "--output-prefix", "made", "--tokenizer-type", "ByteTokenizer"]
    assert main(["preprocess", *words, "--append-eod", "--workers", "0"]) == 0
    tokens = sum(len(text) + 1 for shard in texts for text in shard)
    blend = [0.75, "*.jsonl", 0.25, "made_text_document"]
    file = run_file(train_data_path=blend, skip_bad_documents=True)
    sources = json.loads(printed(capsys, "stats", "--config", file, "--json"))["train"]["sources"]
    stream = sources["*.jsonl"]
    assert stream["samples"] == 30 and sources["made_text_document"]["samples"] == 10
    assert stream["tokens"] == 30 * SEQ_LENGTH and stream["unusable"] == 1
    assert stream["estimated_tokens"] == tokens and stream["epochs"] == 30 * SEQ_LENGTH / tokens
    text = " ".join(printed(capsys, "stats", "--config", file).split())
    assert (
        f"30 samples, about {30 * SEQ_LENGTH / tokens:.2f} epochs, 1,920 tokens of the run (75.0 %)" in text
    )
    assert f"a stream of 4 shards in 4 lanes, {stream['bytes']:,} bytes, about 120 documents" in text
    assert "1 unusable document; the first: 000.jsonl line 1 (byte 0) is unusable: not JSON" in text
    plan = json.loads(printed(capsys, "plan", file, "--json"))
    assert [source["samples"] for source in plan["sources"]] == [30, 10]
    assert plan["sources"][0]["epochs"] == stream["epochs"] and plan["sources"][0]["estimated"]
    assert "estimated" not in plan["sources"][1] and plan["tokens"] == 40 * SEQ_LENGTH
    assert "about 0.1" in printed(capsys, "plan", file)


def test_a_stream_of_the_hub_has_an_unknown_number_of_epochs(capsys):
    write(texts_of(3, 10))
    hub = "hf://json?streaming=true&data_files=*.jsonl"
    file = run_file(train_data_path=[hub])
    stream = json.loads(printed(capsys, "stats", "--config", file, "--json"))["train"]["sources"][hub]
    assert stream["documents"]["count"] == 30 and stream["shards"] == 3
    assert stream["bytes"] is stream["epochs"] is stream["estimated_tokens"] is None
    assert "40 samples, an unknown number of epochs, 2,560 tokens" in printed(
        capsys, "stats", "--config", file
    )
    assert printed(capsys, "plan", file).splitlines()[-1].split()[-1] == "-"
