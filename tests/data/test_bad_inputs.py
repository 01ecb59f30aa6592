"""Bad input of every kind through the commands that read it: a sentence with file and line or row, or a count."""

import codecs
import gzip
import io
import json
import os
import shutil
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import yaml
import zstandard
from s3_store import s3_store

from megalith.cli.main import main
from megalith.data.inputs.hub_dataset import HubDataset
from megalith.data.inputs.row_tables import ROWS
from megalith.data.inputs.source_versions import steady
from megalith.data.inputs.sources import read_document_blocks, read_records, read_texts
from megalith.data.preprocessing.preprocess import preprocess
from megalith.data.streams.stream_shards import RETRIES, ShardReader, list_shards
from megalith.data.tokenizers.open_tokenizer import build_tokenizer
from megalith.errors import DataError
from megalith.remote import _store, open_location

DATA, CONFIG, STOPPED = 3, 2, 20
COUNT = 30
RECORDS = {
    "text": [{"text": f"document {i} with words"} for i in range(COUNT)],
    "sft": [{"prompt": f"p{i} ", "completion": f"answer {i}"} for i in range(COUNT)],
    "dpo": [{"prompt": f"p{i} ", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(COUNT)],
}
MODEL = {"preset": "tiny-gpt", "num_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
COMMANDS = {
    "tokenizer train": "text",
    "preprocess": "text",
    "train": "text",
    "stream": "text",
    "sft": "sft",
    "dpo": "dpo",
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def lines(records) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def table(records) -> pyarrow.Table:
    return pyarrow.table({key: [record[key] for record in records] for key in records[0]})


def latin1_table(records) -> pyarrow.Table:
    """Return a table whose third row has a text in Latin-1."""
    made, key = table(records), list(records[0])[-1]
    values = [value.encode() for value in made.column(key).to_pylist()]
    values[2] = b"caf\xe9 " + values[2]
    size, *buffers = len(values), *pyarrow.array(values, pyarrow.binary()).buffers()[1:]
    return made.set_column(
        made.column_names.index(key), key, pyarrow.StringArray.from_buffers(size, *buffers)
    )


def parquet(made: pyarrow.Table) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(made, file, row_group_size=5)
    return file.getvalue()


def arrow(made: pyarrow.Table, new=pyarrow.ipc.new_stream, closes=True) -> bytes:
    file = io.BytesIO()
    writer = new(file, made.schema)
    writer.write_table(made, max_chunksize=5)
    if closes:
        writer.close()
    return file.getvalue()


def latin1(content: bytes) -> bytes:
    """Return lines of which the third has a byte of Latin-1."""
    parts = content.split(b"\n")
    parts[2] = parts[2].replace(b"2", b"\xe9")
    return b"\n".join(parts)


def bad_files(records) -> dict[str, tuple[bytes, str]]:
    """Return contents by name, each with a part of the error that every command gives."""
    good = lines(records)
    array = json.dumps(records).encode()
    encoded, rows = good.decode().encode, table(records)
    third = "line 3 (byte"
    utf16 = "line 1 (byte 0) is unusable: .*the file is UTF-16: convert it with iconv -f utf-16"
    truncated = "it is damaged or truncated: copy it again"
    end = "bytes without the end marker of an Arrow stream; it is truncated: copy it again"
    damaged = "it is damaged or another kind of file: copy it again"
    return {
        "latin1.jsonl": (latin1(good), third),
        "latin1.jsonl.gz": (gzip.compress(latin1(good)), third),
        "latin1.jsonl.zst": (zstandard.compress(latin1(good)), third),
        "latin1.json": (array.replace(b"2", b"\xe9", 1), r"line 1 (byte 0) is unusable: not UTF-8: byte 0xe9"),
        "latin1.parquet": (parquet(latin1_table(records)), "row 3 is unusable: not UTF-8: byte 0xe9 at 3 of the text"),
        "latin1.arrow": (arrow(latin1_table(records)), "row 3 is unusable: not UTF-8"),
        "mark.jsonl": (encoded("utf-16"), utf16),
        "mark.json": (array.decode().encode("utf-16"), utf16),
        "little.jsonl": (encoded("utf-16-le"), f"{utf16}le"),
        "big.jsonl": (encoded("utf-16-be"), f"{utf16}be"),
        "joined.jsonl": (good + codecs.BOM_UTF8 + good, "line 31 (byte"),
        "zeros.jsonl": (good + bytes(100) + b"\n" + good, "is unusable: it consists of zero bytes"),
        "torn.jsonl": (good[:-10], "line 30 (byte"),
        "nothing.jsonl.gz": (b"", f"it is empty; 0 bytes of its content were read); {truncated}"),
        "nothing.jsonl.zst": (b"", f"it is empty; 0 bytes of its content were read); {truncated}"),
        "nothing.parquet": (b"", damaged),
        "nothing.arrow": (b"", damaged),
        "cut.jsonl.gz": (gzip.compress(good)[:-20], truncated),
        "cut.jsonl.zst": (zstandard.compress(good)[:-3], truncated),
        "plain.jsonl.gz": (good, truncated),
        "cut.parquet": (parquet(rows)[:-20], damaged),
        "inside.parquet": (bytes(200) + parquet(rows)[200:], damaged),
        "packed.parquet.gz": (gzip.compress(parquet(rows)), "because parquet files are read uncompressed"),
        "cut.arrow": (arrow(rows, pyarrow.ipc.new_file)[:-20], damaged),
        "torn.arrow": (arrow(rows)[:-200], damaged),
        "between.arrow": (arrow(rows.slice(0, 15), closes=False), end),
        "two.arrow": (arrow(rows) * 2, "has more bytes after the end of its Arrow stream"),
    }  # fmt: skip


def run_file(data: dict, **sections) -> str:
    tree = {
        "model": MODEL,
        "data": {"seq_length": 32, "tokenizer_type": "ByteTokenizer", "num_workers": 0, **data},
        "optim": {"lr": 0.01},
        "train": {"train_iters": 2, "global_batch_size": 2, "micro_batch_size": 1, "eval_iters": 0,
                  "output_dir": "run", **sections.pop("train", {})},
        **sections,
    }  # fmt: skip
    Path("run.yaml").write_text(yaml.safe_dump(tree))
    return "run.yaml"


def words(command: str, path: str, skip: bool = False) -> list[str]:
    if command == "tokenizer train":
        return [*command.split(), "--input", path, "--vocab-size", "260", "--output", "tokenizer"]
    if command == "preprocess":
        options = ["--tokenizer-type", "ByteTokenizer", "--workers", "0"] + ["--on-error", "skip"] * skip
        return [command, "--input", path, "--output-prefix", "out", *options]
    if command in ("train", "stream"):
        data = {"skip_bad_documents": skip, "streaming": command == "stream"}
        split = {"train_data_path": [path]} if command == "stream" else {"data_path": [path], "split": "1"}
        return ["train", run_file(data | split)]
    return [command, run_file({"data_path": [path], "split": "1"})]


def check_refused(capsys, argv: list[str], part: str, code: int = DATA) -> None:
    """Check that a command exits with `code` and one sentence with `part`, in which `.*` stands for any text."""
    capsys.readouterr()
    assert main(argv) == code
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1, message
    for each in part.split(".*"):
        assert each in message, message
    for made in ("run", "tokenizer"):
        shutil.rmtree(made, ignore_errors=True)
    assert not Path("out_text_document.idx").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_bad_file_is_named_by_every_command_that_reads_it(command, capsys):
    for name, (content, part) in bad_files(RECORDS[COMMANDS[command]]).items():
        Path(name).write_bytes(content)
        check_refused(capsys, words(command, name), f"{name}.*{part}")


@pytest.mark.parametrize("command", ["tokenizer train", "preprocess", "train", "stream"])
def test_bad_text_files_are_named(command, capsys):
    plain = "\n\n".join(record["text"] for record in RECORDS["text"])
    for name, content, part in (
        ("latin1.txt", plain.replace("2", "é", 1).encode("latin-1"), "line 5 (byte 46) is unusable: not UTF-8"),
        ("mark.txt", plain.encode("utf-16"), "line 1 (byte 0) is unusable: .*the file is UTF-16"),
        ("little.txt", plain.encode("utf-16-le"), "every second byte is 0; the file is UTF-16.*iconv -f utf-16le"),
        ("cut.txt.gz", gzip.compress(plain.encode())[:-9], "it is damaged or truncated"),
        ("cut.txt.zst", zstandard.compress(plain.encode())[:-3], "it is damaged or truncated"),
    ):  # fmt: skip
        Path(name).write_bytes(content)
        check_refused(capsys, words(command, name), f"{name}.*{part}")


@pytest.mark.parametrize("command", COMMANDS)
def test_byte_order_marks_and_white_space_before_the_text_are_read(command, capsys):
    records = RECORDS[COMMANDS[command]]
    array = json.dumps(records).encode()
    for name, content in (
        ("lines.jsonl", codecs.BOM_UTF8 + lines(records)),
        ("array.json", codecs.BOM_UTF8 + array),
        ("indented.json", b"\n  " + array),
        ("packed.jsonl.gz", gzip.compress(codecs.BOM_UTF8 + lines(records))),
    ):
        Path(name).write_bytes(content)
        assert main(words(command, name)) == 0
        for made in (*Path().glob("out*"), *Path().glob("tokenizer")):
            shutil.rmtree(made) if made.is_dir() else made.unlink()
        shutil.rmtree("run", ignore_errors=True)


@pytest.mark.parametrize("command", ["preprocess", "train", "stream"])
def test_what_is_skipped_is_counted_and_the_first_is_named(command, capsys):
    records = RECORDS["text"]
    for name, content in (
        ("latin1.jsonl", latin1(lines(records))),
        ("latin1.parquet", parquet(latin1_table(records))),
        ("key.json", json.dumps([*records[:2], {"title": "no text"}, *records[3:]]).encode()),
    ):
        Path(name).write_bytes(content)
        assert main(words(command, name, skip=True)) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert "1 unusable" in printed and f"{name} {'line' if name.endswith('l') else ''}" in printed
        shutil.rmtree("run", ignore_errors=True)
        for made in Path().glob("out*"):
            made.unlink()
    Path("all.jsonl").write_bytes(lines(records).decode().encode("utf-16"))
    check_refused(
        capsys, words(command, "all.jsonl", skip=True), "all.jsonl.*31 .*skipped.*the file is UTF-16"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_empty_files_are_named_or_counted(command, capsys):
    records = RECORDS[COMMANDS[command]]
    empty = table(records).slice(0, 0)
    contents = {
        "nothing.jsonl": b"",
        "blank.jsonl": b"\n \n",
        "nothing.json": b"",
        "array.json": b"[]",
        "packed.jsonl.gz": gzip.compress(b""),
        "packed.jsonl.zst": zstandard.compress(b""),
        "rows.parquet": parquet(empty),
        "rows.arrow": arrow(empty),
    }
    for name, content in contents.items():
        Path(name).write_bytes(content)
        check_refused(capsys, words(command, name), f"{name}.*")
    Path("mixed").mkdir()
    Path("mixed/a.jsonl").write_bytes(lines(records))
    Path("mixed/nothing.jsonl").write_bytes(b"")
    Path("mixed/notes.pdf").write_bytes(b"not text")
    if command == "stream":  # each lane needs text
        check_refused(capsys, words(command, "mixed"), "mixed/nothing.jsonl.*remove empty shards")
        Path("mixed/nothing.jsonl").unlink()
    assert main(words(command, "mixed")) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 files of other kinds are not read: notes.pdf" in printed
    if command not in ("stream", "tokenizer train"):
        assert "1 of 2" in printed and "mixed/nothing.jsonl" in printed


@pytest.mark.parametrize("command", ["preprocess", "train", "stream", "sft", "dpo"])
def test_a_damaged_saved_dataset_is_named(command, capsys):
    datasets.disable_progress_bars()
    records = RECORDS[COMMANDS[command]]
    datasets.Dataset.from_list(records).save_to_disk("good", num_shards=3)
    content = Path("good/data-00001-of-00003.arrow").read_bytes()
    for name, damaged, part in (
        ("missing", None, "cannot be read as a dataset that `save_to_disk` wrote (.*copy it again"),
        ("cut", content[:-100], "cannot be read as a dataset that `save_to_disk` wrote"),
        ("between", content[:-8], "data-00001-of-00003.arrow ends after .*bytes without the end marker"),
        ("empty", b"", "cannot be read as a dataset that `save_to_disk` wrote"),
    ):
        shutil.copytree("good", name)
        file = Path(name, "data-00001-of-00003.arrow")
        file.unlink() if damaged is None else file.write_bytes(damaged)
        check_refused(capsys, words(command, name), f"{name}.*{part}")
    datasets.DatasetDict(train=datasets.Dataset.from_list(records)).save_to_disk("splits")
    check_refused(
        capsys, words(command, "splits"), "splits has the splits train; name the folder of one", CONFIG
    )
    assert main(words(command, "good")) == 0


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("query", ["", "?streaming=true"])
def test_a_hub_that_is_not_reachable_is_named_at_once(command, query, capsys, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    argv = words(command, f"hf://nobody/nothing{query}")
    check_refused(capsys, argv, "'nobody/nothing' with split 'train' is not in the local Hugging Face cache")
    assert "retries failed" not in capsys.readouterr().err


def test_a_stream_of_the_hub_that_breaks_off_names_its_row(monkeypatch):
    class Broken:
        column_names = ["text"]

        def with_format(self, kind):
            return self

        def select_columns(self, keys):
            return self

        def iter(self, size):
            yield pyarrow.table({"text": ["a"] * ROWS})
            raise ConnectionError("reset by peer")

        def __iter__(self):
            yield {"text": "a"}
            raise ConnectionError("reset by peer")

    monkeypatch.setattr("datasets.load_dataset", lambda *args, **options: Broken())
    source = HubDataset("hf://owner/name?streaming=true")
    for read, rows in ((lambda: read_texts(source, ["text"]), ROWS), (lambda: read_records(source), 1)):
        with pytest.raises(DataError, match=rf"cannot be read after row {rows:,} \(reset by peer\)"):
            list(read())


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


def texts_of(number: int, word: str = "word") -> bytes:
    return lines([{"text": f"file {number} document {i} {word} " * (1 + i % 3)} for i in range(80)])


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
            not streaming
            or "1 files have modification times that differ from those at the checkpoint" in printed
        )


@pytest.mark.parametrize(
    ("command", "setting"),
    [("preprocess", "json_keys (--json-keys)"), ("train", "data.text_key"), ("stream", "data.text_key")],
)
@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_text_under_another_key_is_refused_with_the_setting_that_names_it(command, setting, ending, capsys):
    records = [{"content": "a document"}]
    content = lines(records) if ending == "jsonl" else json.dumps(records).encode()
    Path(f"a.{ending}").write_bytes(content)
    message = (
        f"it has no key 'text' (its keys: 'content'); set {setting} if the text has another key, correct or"
    )
    check_refused(capsys, words(command, f"a.{ending}"), message)


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
        "data_text_document has token id .*but the vocabulary has 257; preprocess the data with this run's"
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


@pytest.mark.parametrize("command", COMMANDS)
def test_bad_objects_of_a_store_are_named_like_files(command, endpoint, capsys):
    kind = COMMANDS[command]
    wanted = (
        "latin1.jsonl",
        "cut.jsonl.gz",
        "cut.jsonl.zst",
        "cut.parquet",
        "latin1.parquet",
        "between.arrow",
    )
    files = bad_files(RECORDS[kind])
    for name in wanted:
        content, part = files[name]
        open_location(f"s3://texts/{kind}/{name}").write(content)
        check_refused(capsys, words(command, f"s3://texts/{kind}/{name}"), f"{name}.*{part}")
    check_refused(
        capsys,
        words(command, "s3://texts/none/*.jsonl"),
        "no file matches the input 's3://texts/none/*.jsonl'",
    )
    open_location(f"s3://texts/{kind}/good.jsonl").write(lines(RECORDS[kind]))
    assert main(words(command, f"s3://texts/{kind}/good.jsonl")) == 0


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
