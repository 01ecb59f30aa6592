"""Bad input of every kind through the commands that read it: a sentence with file and line or row, or a count."""

import codecs
import gzip
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import datasets
import pyarrow
import pytest
import zstandard
from bad_files import (
    COMMANDS,
    CONFIG,
    RECORDS,
    arrow,
    bad_files,
    check_refused,
    latin1,
    latin1_table,
    lines,
    parquet,
    table,
    words,
)
from default_cases import in_full
from s3_store import s3_store

from megalith.cli.main import main
from megalith.data.inputs.hub_dataset import HubDataset
from megalith.data.inputs.row_tables import ROWS
from megalith.data.inputs.sources import read_records, read_texts
from megalith.errors import DataError
from megalith.remote import open_location


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def some_of(command: str, files: Iterable, stride: int) -> list:
    """Return every stride-th of the files. Commands one after the other begin at different files."""
    return list(files)[list(COMMANDS).index(command) % stride :: stride]


some_or_all_files = pytest.mark.parametrize(
    "stride", [3, in_full(1)]
)  # by default two commands read each file


@some_or_all_files
@pytest.mark.parametrize("command", COMMANDS)
def test_every_bad_file_is_named_by_every_command_that_reads_it(command, stride, capsys):
    for name, (content, part) in some_of(command, bad_files(RECORDS[COMMANDS[command]]).items(), stride):
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


@some_or_all_files
@pytest.mark.parametrize("command", COMMANDS)
def test_byte_order_marks_and_white_space_before_the_text_are_read(command, stride, capsys):
    records = RECORDS[COMMANDS[command]]
    array = json.dumps(records).encode()
    files = (
        ("lines.jsonl", codecs.BOM_UTF8 + lines(records)),
        ("array.json", codecs.BOM_UTF8 + array),
        ("indented.json", b"\n  " + array),
        ("packed.jsonl.gz", gzip.compress(codecs.BOM_UTF8 + lines(records))),
    )
    for name, content in some_of(command, files, stride):
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
    assert "1 file of another kind not read: notes.pdf" in printed
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
        capsys, words(command, "splits"), "splits has the splits train; pass the folder of one", CONFIG
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


@pytest.fixture(scope="module")
def endpoint():
    """An S3 server on this machine with the bucket `texts`."""
    with s3_store("texts", AWS_MAX_ATTEMPTS="1"):
        yield


@some_or_all_files
@pytest.mark.parametrize("command", COMMANDS)
def test_bad_objects_of_a_store_are_named_like_files(command, stride, endpoint, capsys):
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
    for name in some_of(command, wanted, stride):
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
