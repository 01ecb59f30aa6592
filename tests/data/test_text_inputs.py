"""All kinds of input give the same documents, and unusable input is named by file and line or row."""

import codecs
import gzip
import io
import json
import pickle
import random

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megalith.cli.main import main
from megalith.data.indexed import IndexedDataset
from megalith.data.inputs.plain_text import read_text_blocks
from megalith.data.inputs.source_versions import source_versions
from megalith.data.inputs.sources import expand_inputs, read_document_blocks, read_records, read_texts
from megalith.data.preprocessing.preprocess import preprocess
from megalith.data.tokenizers.open_tokenizer import build_tokenizer
from megalith.errors import ConfigError, DataError
from megalith.remote import open_location

TEXTS = ["one fox", "zwei\nFüchse 🦊", "three", "x" * 300]


def jsonl(texts=TEXTS, key="text") -> bytes:
    return b"".join(json.dumps({key: text, "n": 1}).encode() + b"\n" for text in texts)


def table(texts=TEXTS, kind=None) -> pyarrow.Table:
    return pyarrow.table({"n": range(len(texts)), "text": pyarrow.array(texts, kind)})


def write_arrow(path, stream, kind=None):
    new = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with new(path, table(kind=kind).schema) as writer:
        writer.write_table(table(kind=kind), max_chunksize=3)


def write_input(folder, kind) -> str:
    """Write TEXTS as an input of `kind` and return its name."""
    if kind == "jsonl":
        (folder / "a.jsonl").write_bytes(jsonl())
    elif kind in ("jsonl.gz", "txt.gz"):
        content = jsonl() if kind == "jsonl.gz" else "\n \n".join(TEXTS).encode()
        (folder / f"a.{kind}").write_bytes(gzip.compress(content))
    elif kind == "json":
        (folder / "a.json").write_text(json.dumps([{"text": text} for text in TEXTS]))
    elif kind == "txt":
        (folder / "a.txt").write_bytes(codecs.BOM_UTF8 + "\n\n".join(["", *TEXTS, ""]).encode())
    elif kind == "txt.zst":
        (folder / "a.txt.zst").write_bytes(
            zstandard.ZstdCompressor().compress("\r\n\r\n".join(TEXTS).encode())
        )
    elif kind == "parquet":
        pyarrow.parquet.write_table(
            table(kind=pyarrow.large_string()), folder / "a.parquet", row_group_size=3
        )
    elif kind.startswith("arrow"):
        dictionary = pyarrow.dictionary(pyarrow.int8(), pyarrow.string())
        write_arrow(
            folder / "a.arrow", kind == "arrow stream", dictionary if kind == "arrow stream" else None
        )
    elif kind == "saved":
        datasets.Dataset(table()).save_to_disk(str(folder / "saved"))
        return str(folder / "saved")
    else:
        (folder / "a.jsonl").write_bytes(jsonl())
        return f"hf://json?data_files={folder / 'a.jsonl'}&streaming={str(kind == 'stream').lower()}"
    return str(folder)  # a folder, of which the file is read


@pytest.mark.parametrize(
    "kind",
    ["jsonl", "jsonl.gz", "json", "txt", "txt.zst", "txt.gz", "parquet", "arrow file", "arrow stream", "saved",
     "hub", "stream"],
)  # fmt: skip
def test_every_kind_of_input_gives_the_same_documents_and_records(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("megalith.data.inputs.row_tables.ROWS", 2)
    (source,) = expand_inputs([write_input(tmp_path, kind)])
    assert list(read_texts(source, ["text"], text_documents="block")) == TEXTS
    records = list(read_records(source, "block"))
    assert [record["text"] for _, record in records] == TEXTS
    unit = "line" if kind.startswith(("jsonl", "txt")) else "entry" if kind == "json" else "row"
    assert all(position.startswith(unit) for position, _ in records)
    blocks = list(read_document_blocks(source, ["text"], "block"))
    positions = [block.position for block in blocks]
    assert positions == sorted(positions) and sum(block.num_bytes for block in blocks) >= sum(map(len, TEXTS))


def test_a_text_file_is_one_document_without_its_byte_order_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + b"one\n\ntwo\r\n")
    (tmp_path / "b.txt").write_bytes(b"")
    assert [list(read_texts(path, ["any"])) for path in expand_inputs([tmp_path])] == [
        ["one\n\ntwo\r\n"],
        [""],
    ]


@pytest.mark.parametrize("block_bytes", [1, 5, 1 << 18])
def test_documents_between_blank_lines_keep_their_lines_and_bytes(tmp_path, block_bytes):
    content = b"\n \na\nb\n\n\t\nc\r\n\r\n" + b"d" * 50 + b"\nd\n\ne"
    (tmp_path / "a.txt").write_bytes(content)
    blocks = list(read_text_blocks(tmp_path / "a.txt", "block", 20, block_bytes))
    parsed = [block.parse(["text"], 20) for block in blocks]
    records = [record for good, _ in parsed for record in good]
    assert [(r.line, r.texts) for r in records] == [(3, ["a\nb"]), (7, ["c"]), (12, ["e"])]
    assert all(content[r.offset :].startswith(r.texts[0].encode()) for r in records)
    ((bad,),) = [bad for _, bad in parsed if bad]
    assert bad.line == 9 and "longer than the limit of 20" in bad.reason


def blocks_of_lines(content: bytes) -> list[tuple[int, int, bytes]]:
    """Return line, byte and content of each document between blank lines, line by line."""
    documents, lines, offset, first = [], [], 0, (0, 0)
    for number, raw in enumerate([*content.split(b"\n"), b""], 1):
        line = raw.removeprefix(codecs.BOM_UTF8) if offset == 0 else raw
        if line.strip():
            first = first if lines else (number, offset + len(raw) - len(line))
            lines.append(line)
        elif lines:
            documents.append((*first, b"\n".join(lines).removesuffix(b"\r")))
            lines = []
        offset += len(raw) + 1
    return documents


@pytest.mark.parametrize("block_bytes", [1, 3, 100])
def test_random_text_is_divided_as_line_by_line(tmp_path, block_bytes):
    choose, path = random.Random(block_bytes), tmp_path / "a.txt"
    parts = [b"\n", b"\n", b" ", b"a", b"bb \n", b"\t\n", b"cc"]
    for _ in range(100):
        mark = choose.choice([b"", b"", codecs.BOM_UTF8])
        content = mark + b"".join(choose.choices(parts, k=choose.randint(0, 40)))
        path.write_bytes(content.replace(b"\n", b"\r\n") if choose.random() < 0.2 else content)
        expected = blocks_of_lines(path.read_bytes())
        for limit in (1000, 6):
            blocks = read_text_blocks(path, "block", limit, block_bytes)
            documents = [document for block in blocks for document in block.documents]
            if limit < 1000:  # too long ones are cut to one byte more
                if b"\r" in path.read_bytes():
                    continue
                documents, expected = (
                    [(line, text if len(text) <= limit else None) for line, _, text in each]
                    for each in (documents, expected)
                )
            assert documents == expected


def test_preprocessing_a_mixed_folder_equals_preprocessing_its_jsonl(tmp_path, capsys):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(jsonl(TEXTS[:1]))
    (folder / "b.txt").write_text(TEXTS[1])
    pyarrow.parquet.write_table(table(TEXTS[2:]), folder / "deep" / "c.parquet")
    for ignored in ("notes.pdf", ".hidden.txt"):
        (folder / ignored).write_text("ignored")
    (folder / "z.txt").write_text("")
    (tmp_path / "all.jsonl").write_bytes(jsonl())
    words = ["--tokenizer-type", "ByteTokenizer", "--append-eod", "--workers", "0"]
    for name, source in (("mixed", folder), ("plain", tmp_path / "all.jsonl")):
        assert (
            main(["preprocess", "--input", str(source), "--output-prefix", str(tmp_path / name), *words]) == 0
        )
    printed = capsys.readouterr().out
    assert "1 file of another kind not read: notes.pdf" in printed
    assert "1 of 4 inputs have no document" in printed and "1 empty documents" in printed
    training = ["--input", str(folder), "--vocab-size", "300", "--output", str(tmp_path / "tokenizer")]
    assert main(["tokenizer", "train", *training]) == 0
    printed = capsys.readouterr().out
    assert "trained 2" in printed and "on 5 documents" in printed and "not read: notes.pdf" in printed
    mixed, plain = (IndexedDataset(str(tmp_path / f"{name}_text_document")) for name in ("mixed", "plain"))
    assert [m.tolist() for m in map(mixed.get, range(len(mixed)))] == [
        p.tolist() for p in map(plain.get, range(len(plain)))
    ]


def test_a_folder_of_an_object_store_is_read_like_a_local_one(tmp_path):
    folder = f"memory://bucket/{tmp_path.name}"
    parquet, arrow = io.BytesIO(), io.BytesIO()
    pyarrow.parquet.write_table(table(), parquet)
    with pyarrow.ipc.new_file(arrow, table().schema) as writer:
        writer.write_table(table())
    contents = {
        "a.parquet": parquet.getvalue(),
        "b.arrow": arrow.getvalue(),
        "c.txt.gz": None,
        "d.jsonl": jsonl(),
    }
    contents["c.txt.gz"] = gzip.compress("\n\n".join(TEXTS).encode())
    for name, content in {**contents, "e.pdf": b"none"}.items():
        open_location(f"{folder}/{name}").write(content)
    notes: list[str] = []
    sources = expand_inputs([folder], notes)
    assert [source.name for source in sources] == list(contents) and "not read: e.pdf" in notes[0]
    assert all(list(read_texts(source, ["text"], text_documents="block")) == TEXTS for source in sources)
    assert expand_inputs([f"{folder}/*.txt.gz"]) == [sources[2]]
    assert [version[0] for version in source_versions(sources)] == list(map(str, sources))


def test_blocks_of_tables_and_text_reach_worker_processes(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(TEXTS))
    pyarrow.parquet.write_table(table(), tmp_path / "b.parquet")
    for source in expand_inputs([tmp_path]):
        blocks = pickle.loads(pickle.dumps(list(read_document_blocks(source, ["text"], "block"))))
        assert [record.texts[0] for block in blocks for record in block.parse(["text"])[0]] == TEXTS


def bad_text(folder):
    (folder / "a.txt").write_bytes(b"fine\n\nalso\n\xe9t\xe9\n\nend")
    return "a.txt line 4 (byte 11) is unusable: not UTF-8: byte 0xe9 at 0 of the line"


def utf16(folder):
    (folder / "a.jsonl").write_bytes('{"text": "a"}'.encode("utf-16"))
    return "byte 0xff at 0 of the line (invalid start byte); the file is UTF-16: convert it with iconv"


def null(folder):
    pyarrow.parquet.write_table(table(["a", None, "b"]), folder / "a.parquet")
    return "a.parquet row 2 is unusable: its 'text' is null, not a string"


def entry(folder):
    (folder / "a.json").write_text('[{"text": "a"}, {"text": 3}]')
    return "a.json entry 2 is unusable: its 'text' is a number, not a string"


@pytest.mark.parametrize("make", [bad_text, utf16, null, entry])
def test_an_unusable_document_is_named_or_skipped_and_counted(tmp_path, make):
    message = make(tmp_path)
    tokenizer = build_tokenizer("ByteTokenizer")
    arguments = dict(workers=0, text_documents="block", show_progress=False)
    with pytest.raises(DataError) as error:
        preprocess([tmp_path], tmp_path / "out", tokenizer, **arguments)
    assert message in str(error.value)
    (tmp_path / "good.txt").write_text("good")
    summary = preprocess([tmp_path], tmp_path / "out", tokenizer, on_error="skip", **arguments)
    assert summary.skipped == 1 and message in str(summary.bad_lines[0])


@pytest.mark.parametrize(
    ("columns", "message"),
    [({"text": [1, 2]}, "a.parquet has a column 'text' of int64, not of strings"),
     ({"content": ["a"]}, "a.parquet has no column text; it has content")],
)  # fmt: skip
def test_a_table_without_a_column_of_text_is_refused(tmp_path, columns, message):
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=message):
        list(read_texts(tmp_path / "a.parquet", ["text"]))


def test_damaged_and_unreachable_inputs_are_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(np.random.default_rng(0).bytes(9000))[:-20])
    with pytest.raises(DataError, match=r"a.txt.gz is not a complete .gz file .*copy it again"):
        list(read_texts(tmp_path / "a.txt.gz", ["text"]))
    for name in ("a.parquet", "a.arrow"):
        (tmp_path / name).write_bytes(b"PAR1 nothing more")
        with pytest.raises(DataError, match=f"{name} cannot be read as"):
            list(read_texts(tmp_path / name, ["text"]))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    (hub,) = expand_inputs(["hf://nobody/nothing"])
    with pytest.raises(DataError, match=r"'nobody/nothing' with split 'train' .* could not be downloaded"):
        list(read_texts(hub, ["text"]))
    (typo,) = expand_inputs(["hf://nobody/nothing?splitt=train"])
    with pytest.raises(ConfigError, match=r"sets 'splitt'.*did you mean 'split'"):
        list(read_texts(typo, ["text"]))
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(
        ConfigError, match=r"b.txt is a .txt file, .* but 2 keys are set \(text, title\); set only one"
    ):
        list(read_texts(tmp_path / "b.txt", ["text", "title"]))
    with pytest.raises(DataError, match="has no file that ends in"):
        (tmp_path / "empty").mkdir()
        expand_inputs([tmp_path / "empty"])


SPLIT_FOLDERS = {
    ("train.jsonl", "test.jsonl"): "test, train",
    ("data/train-00000-of-00001.jsonl", "data/validation-00000-of-00001.jsonl"): "train, validation",
    ("train/a.jsonl", "train/b.jsonl", "eval/a.jsonl"): "test, train",
    ("my_train_1.jsonl", "my_dev_1.jsonl"): "train, validation",
    ("train-0.jsonl", "train-1.jsonl"): None,
    ("training.jsonl", "latest.jsonl", "devices.jsonl"): None,
}


@pytest.mark.parametrize("names", SPLIT_FOLDERS)
def test_a_folder_with_files_of_several_splits_is_refused_as_datasets_tells_them_apart(tmp_path, names):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}\n')
    found = datasets.load_dataset(str(tmp_path), cache_dir=str(tmp_path / ".cache"))
    splits = SPLIT_FOLDERS[names]
    assert (", ".join(sorted(found)) == splits) if splits else list(found) == ["train"]
    if splits is None:
        assert len(expand_inputs([tmp_path])) == len(names)
        return
    with pytest.raises(
        DataError, match=f"has files of the splits {splits}, which would be mixed; .*{names[0]}"
    ):
        expand_inputs([tmp_path])
