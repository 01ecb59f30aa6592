"""Data, tokenizers and stores that change while a run reads them or between a run and its resume."""

import os
import shutil
from pathlib import Path

import pytest
from bad_files import CONFIG, DATA, MODEL, RECORDS, STOPPED, check_refused, lines, run_file, texts_of
from s3_store import s3_store

from megalith.cli.main import main
from megalith.data.inputs.source_versions import steady
from megalith.data.inputs.sources import read_document_blocks
from megalith.data.preprocessing.preprocess import preprocess
from megalith.data.streams.stream_shards import RETRIES, ShardReader, list_shards
from megalith.data.tokenizers.open_tokenizer import build_tokenizer
from megalith.errors import DataError
from megalith.remote import _store, open_location


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_source_that_changes_or_disappears_while_it_is_read_is_named(monkeypatch):
    for change, message in (
        (
            lambda: Path("a.jsonl").write_text('{"text": "other"}\n'),
            r"a.jsonl changed while .*: [\d,]+ bytes",
        ),
        (lambda: os.utime("a.jsonl", ns=(1, 1)), "a.jsonl changed while the run read it"),
        (lambda: Path("a.jsonl").unlink(), "cannot read a.jsonl: No such file"),
    ):
        Path("a.jsonl").write_bytes(lines(RECORDS["text"]))
        items = steady(Path("a.jsonl"), iter(range(2)))
        assert next(items) == 0
        change()
        with pytest.raises(DataError, match=message):
            list(items)
    texts = Path("a.jsonl")
    texts.write_bytes(lines(RECORDS["text"]))

    def growing(*args):
        yield from read_document_blocks(*args)
        texts.write_bytes(texts.read_bytes() * 2)

    monkeypatch.setattr("megalith.data.preprocessing.preprocess.read_document_blocks", growing)
    with pytest.raises(DataError, match=r"a.jsonl changed while the run read it"):
        preprocess([texts], "out", build_tokenizer("ByteTokenizer"), workers=0, show_progress=False)
    assert not [*Path().glob("out*")]


CHANGES = {
    "gone": lambda: Path("t/1.jsonl").unlink(),
    "grown": lambda: Path("t/1.jsonl").write_bytes(texts_of(1) * 2),
    "edited": lambda: Path("t/1.jsonl").write_bytes(texts_of(1, "ward")),
    "added": lambda: Path("t/3.jsonl").write_bytes(texts_of(3)),
    "renamed": lambda: Path("t/0.jsonl").rename("t/9.jsonl"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("streaming", [False, True])
def test_files_that_change_between_a_run_and_its_resume_are_named(change, streaming, capsys):
    Path("t").mkdir()
    for number in range(3):
        Path(f"t/{number}.jsonl").write_bytes(texts_of(number))
    data = {"train_data_path" if streaming else "data_path": ["t/*.jsonl"], "streaming": streaming}
    data |= {} if streaming else {"split": "1"}
    train = {"train_iters": 4, "exit_interval": 2}
    argv = ["train", run_file(data, train=train, checkpoint={"load": "run"})]
    assert main(argv) == STOPPED
    CHANGES[change]()
    capsys.readouterr()
    if streaming and change != "edited":
        check_refused(
            capsys, argv, "t/*.jsonl has .*start a new run with model.init_from set to the checkpoint"
        )
    else:
        assert main(argv) in (0, STOPPED)
        printed = " ".join(capsys.readouterr().out.split())
        assert "samples may differ" in printed
        assert (
            not streaming or "the modification time of 1 file differs from that at the checkpoint" in printed
        )


def test_the_next_samples_of_a_finished_run_are_refused(capsys):
    Path("t.jsonl").write_bytes(texts_of(0))
    assert main(["train", run_file({"data_path": ["t.jsonl"], "split": "1"})]) == 0
    show = ["data", "show", "--config", "run.yaml"]
    assert main([*show, "--step", "2"]) == 0 and main([*show, "--position", "1"]) == 0
    check_refused(capsys, show, "the run has finished its 2 steps and reads no more", CONFIG)


def test_another_order_or_tokenizer_on_resume_is_named(capsys):
    for number in range(2):
        Path(f"{number}.jsonl").write_bytes(texts_of(number))
    for name, vocab in (("a", "270"), ("b", "265")):
        training = ["--input", "0.jsonl", "--vocab-size", vocab, "--output", name]
        assert main(["tokenizer", "train", *training]) == 0
    data = {"data_path": [0.4, "0.jsonl", 0.6, "1.jsonl"], "split": "1"}
    data |= {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "a"}
    fixed = dict(train={"train_iters": 6, "exit_interval": 2}, checkpoint={"load": "run"})
    fixed["model"] = MODEL | {"vocab_size": 512}
    other = ["--data.data_path", "[0.4, 1.jsonl, 0.6, 0.jsonl]"]
    for streaming in (True, False):
        argv = ["train", run_file(data | {"streaming": streaming}, **fixed)]
        assert main(argv) == STOPPED
        capsys.readouterr()
        assert main([*argv, "--data.tokenizer_model", "b"]) == 4
        assert "was trained with another tokenizer (270 entries" in capsys.readouterr().err
        code, printed = main([*argv, *other]), capsys.readouterr()
        if streaming:
            assert code == DATA
            assert "at a position in 0.jsonl, but the run reads 1.jsonl in its place; name" in printed.err
        else:
            assert "data.data_path was [0.4, '0.jsonl'" in " ".join(printed.out.split())
        shutil.rmtree("run")


def test_a_tokenizer_that_does_not_match_stored_tokens_or_the_model_is_named(capsys):
    Path("t.jsonl").write_bytes(texts_of(0))
    assert main(["tokenizer", "train", "--input", "t.jsonl", "--vocab-size", "280", "--output", "tok"]) == 0
    tokenizer = build_tokenizer("HuggingFaceTokenizer", "tok")
    preprocess(["t.jsonl"], "data", tokenizer, append_eod=True, workers=0, show_progress=False)
    data = {"data_path": "data_text_document", "split": "1"}
    mismatch = (
        "data_text_document has token id .*but the vocabulary has 257 entries; preprocess .* with this run"
    )
    check_refused(capsys, ["train", run_file(data)], "was made with .*tok.*but the tokenizer is Byte", CONFIG)
    Path("data_text_document.tokenizer.json").unlink()
    check_refused(capsys, ["train", run_file(data)], mismatch)
    model = MODEL | {"vocab_size": 260}
    own = data | {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "tok"}
    larger = "the tokenizer has 280 entries, but model.vocab_size is 260"
    check_refused(capsys, ["train", run_file(own, model=model)], larger, CONFIG)
    Path("data_text_document.bin").unlink()
    missing = "data_text_document.bin not found.*make the dataset with megalith preprocess"
    check_refused(capsys, ["train", run_file(own)], missing)


@pytest.fixture(scope="module")
def endpoint():
    """An S3 server on this machine with the bucket `texts`."""
    with s3_store("texts", AWS_MAX_ATTEMPTS="1"):
        yield


def test_an_object_that_changes_while_a_stream_reads_it_is_named(endpoint, capsys):
    pauses: list[float] = []
    for name, change, message in (
        ("changed", lambda path: path.write(texts_of(1)), "changed while the run read it"),
        ("gone", lambda path: path.unlink(), "cannot read s3://texts/stream/gone.jsonl"),
    ):
        path = open_location(f"s3://texts/stream/{name}.jsonl")
        path.write(texts_of(0))
        [shard] = list_shards(str(path))
        reader = ShardReader("text", "file", pauses.append)
        assert [number for number, _ in reader.blocks(shard, 0)] == [0]
        change(path)
        with pytest.raises(DataError, match=message):
            list(reader.blocks(shard, 0))
        assert not pauses


def test_a_store_that_cannot_be_reached_is_retried_and_then_named(endpoint, monkeypatch):
    path = open_location("s3://texts/away.jsonl")
    path.write(texts_of(0))
    [shard] = list_shards(str(path))
    pauses: list[float] = []
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    _store.cache_clear()
    message = rf"cannot read s3://texts/away.jsonl.*{RETRIES} retries failed, in block 0"
    with pytest.raises(DataError, match=message):
        list(ShardReader("text", "file", pauses.append).blocks(shard, 0))
    assert pauses == [1, 2, 4, 8, 16]
    monkeypatch.undo()
    _store.cache_clear()
