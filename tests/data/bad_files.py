"""Bad files of every kind, the commands that read them, and the check of their errors."""

import codecs
import gzip
import io
import json
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import yaml
import zstandard

from megalith.cli.main import main

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


def texts_of(number: int, word: str = "word") -> bytes:
    return lines([{"text": f"file {number} document {i} {word} " * (1 + i % 3)} for i in range(80)])
