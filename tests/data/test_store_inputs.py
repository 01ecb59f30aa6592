"""Text in object stores, over the protocols of S3 and Google Cloud Storage, from servers of this machine."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
import zstandard
from google_store import google_store
from s3_store import s3_store

from megalith.bridge.folder import name_in_folder, resolve_folder, tokenizer_files
from megalith.cli.main import main
from megalith.data.inputs.sources import expand_inputs
from megalith.data.streams.stream_shards import ShardReader, list_shards
from megalith.errors import DataError
from megalith.remote import StorePath, _store, open_location

STOPPED = 20
CLIENTS = {"s3": "s3fs", "gs": "gcsfs"}


@pytest.fixture(scope="module", params=CLIENTS)
def store(request):
    """URL of a bucket."""
    _store.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it asks Google itself with every request
        pytest.importorskip(CLIENTS[request.param], reason="pip install 'megalith[remote]'")
        if request.param == "gs":
            patch.setenv("FSSPEC_GS_TOKEN", "anon")
            with google_store() as (_, address):
                patch.setenv("STORAGE_EMULATOR_HOST", address)
                yield "gs://bucket"
            _store.cache_clear()
        else:
            with s3_store(AWS_MAX_ATTEMPTS="1"):
                yield "s3://bucket"


def texts_of(number: int, word: str = "word") -> bytes:
    texts = [f"file {number} document {i} {word} " * (1 + i % 3) for i in range(60)]
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def written(folder: Path, url: str) -> None:
    """Write text of every kind to a local folder and below a URL."""
    rows = pyarrow.table({"text": [f"row {i} of a table" for i in range(9)]})
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(texts_of(0))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(texts_of(1)))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(texts_of(2)))
    (folder / "d.txt").write_text("a page\n\nof text\n")
    (folder / "e.json").write_text(json.dumps([{"text": "an entry"}, {"text": "another"}]))
    pyarrow.parquet.write_table(rows, folder / "f.parquet")
    with (
        pyarrow.OSFile(str(folder / "g.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, rows.schema) as to,
    ):
        to.write_table(rows)
    (folder / "more").mkdir()
    (folder / "more/h.txt.gz").write_bytes(gzip.compress(b"below"))
    for path in folder.rglob("*.*"):
        open_location(f"{url}/{path.relative_to(folder)}").send(path)


def run_file(data: dict, output: str = "run", **sections) -> str:
    train = {"train_iters": 6, "global_batch_size": 4, "micro_batch_size": 2, "eval_iters": 0}
    tree = {
        "model": {"preset": "tiny-gpt", "num_layers": 1, "hidden_size": 32, "num_attention_heads": 2},
        "data": {"seq_length": 32, "tokenizer_type": "ByteTokenizer", "num_workers": 1, **data},
        "optim": {"lr": 0.01},
        "train": train | {"output_dir": output, "deterministic": True} | sections.pop("train", {}),
        "runtime": {"device": "cpu"},
        **sections,
    }
    Path(f"{output}.yaml").write_text(yaml.safe_dump(tree))
    return f"{output}.yaml"


def losses(output: str) -> list[float]:
    lines = Path(output, "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for line in lines if "loss" in (record := json.loads(line))]


def test_every_kind_of_text_is_read_as_from_a_folder(store):
    written(Path("texts"), f"{store}/kinds")
    words = ["--tokenizer-type", "ByteTokenizer", "--append-eod", "--workers", "0"]
    for number, inputs in enumerate((["{}"], ["{}/*.*"], ["{}/a.jsonl", "{}/more", "{}/[bcd].*"])):
        for place, output in (("texts", f"here{number}"), (f"{store}/kinds", f"{store}/made{number}")):
            names = [name.format(place) for name in inputs]
            assert main(["preprocess", "--input", *names, "--output-prefix", output, *words]) == 0
        for ending in ("bin", "idx", "tokenizer.json"):
            name = f"{number}_text_document.{ending}"
            assert open_location(f"{store}/made{name}").read_bytes() == Path(f"here{name}").read_bytes()


@pytest.mark.full
def test_a_run_on_a_dataset_or_text_in_the_store_equals_a_local_one(store):
    written(Path("texts"), f"{store}/trained")
    words = ["--input", "texts", "--tokenizer-type", "ByteTokenizer", "--append-eod", "--workers", "0"]
    for prefix in ("here", f"{store}/there"):
        assert main(["preprocess", *words, "--output-prefix", prefix]) == 0
    paths = {
        "local": "here_text_document",
        "bin": f"{store}/there_text_document",
        "text": [f"{store}/trained"],
    }
    for name, path in paths.items():
        assert main(["train", run_file({"data_path": path, "split": "1"}, name)]) == 0
    assert losses("local") == losses("bin") == losses("text")


def test_a_glob_of_many_objects_takes_few_requests(store, monkeypatch):
    for number in range(12):
        open_location(f"{store}/many/{number:02d}.jsonl").write(texts_of(number))
    requests: list[str] = []
    asking = StorePath.asking
    monkeypatch.setattr(StorePath, "asking", lambda self: requests.append(str(self)) or asking(self))
    shards = list_shards(f"{store}/many/*.jsonl")
    assert len(shards) == 12 and len(requests) <= 4
    for shard in shards:
        [(name, size, version)] = shard.versions
        assert (name, (size, version)) == (str(shard), shard.source.stat())
    assert list_shards(str(shards[3])) == [shards[3]]
    assert expand_inputs([f"{store}/many"]) == [shard.source for shard in shards]


def test_a_stream_resumes_bitwise_and_a_changed_object_is_refused(store, capsys):
    for number in range(4):
        open_location(f"{store}/stream/{number}.jsonl").write(texts_of(number))
    data = {"train_data_path": [f"{store}/stream/*.jsonl"], "streaming": True}
    assert main(["train", run_file(data, "straight")]) == 0
    stopped = {"exit_interval": 3}
    assert main(["train", run_file(data, "first", train=stopped)]) == STOPPED
    assert main(["train", run_file(data, "moved", checkpoint={"load": "first"})]) == 0
    assert losses("first") + losses("moved") == losses("straight")
    changed = open_location(f"{store}/stream/2.jsonl")
    for content, message in (
        (texts_of(2, "ward"), f"2.jsonl ({len(texts_of(2)):,} bytes, version "),
        (texts_of(2) + texts_of(5), f"is {changed} ({len(texts_of(2) + texts_of(5)):,} bytes, version "),
    ):
        changed.write(content)
        capsys.readouterr()
        again = run_file(data, "again", checkpoint={"load": "first"})
        assert main(["train", again]) == DataError.exit_code
        error = " ".join(capsys.readouterr().err.split())
        assert "stream/*.jsonl has changed since the checkpoint" in error and message in error


def test_an_object_that_changes_before_a_stream_opens_it_is_refused(store):
    path = open_location(f"{store}/later.jsonl")
    path.write(texts_of(0))
    [shard] = list_shards(str(path))
    path.write(texts_of(0, "ward"))
    with pytest.raises(DataError, match=r"later.jsonl changed while the run read it: .* before, .* now"):
        list(ShardReader("text", "file").blocks(shard, 0))


def test_a_run_saves_to_the_store_and_continues_from_it(store):
    Path("a.jsonl").write_bytes(texts_of(0))
    data = {"data_path": ["a.jsonl"], "split": "1"}
    assert main(["train", run_file(data, "straight")]) == 0
    kept = {"save": f"{store}/runs/one", "load": f"{store}/runs/one"}
    first = run_file(data, "first", checkpoint=kept, train={"exit_interval": 3})
    assert main(["train", first]) == STOPPED
    assert main(["train", run_file(data, "moved", checkpoint=kept)]) == 0
    assert losses("first") + losses("moved") == losses("straight")


def test_missing_objects_are_named(store, capsys):
    for name in ("none.jsonl", "none/*.jsonl", "none"):
        capsys.readouterr()
        words = ["--output-prefix", "out", "--tokenizer-type", "ByteTokenizer"]
        assert main(["preprocess", "--input", f"{store}/{name}", *words]) == DataError.exit_code
        assert f"no file matches the input '{store}/{name}'" in " ".join(capsys.readouterr().err.split())


def test_a_models_named_chat_templates_are_fetched_with_its_tokenizer(store):
    folder = open_location(f"{store}/model")
    for name in ("config.json", "tokenizer.json", "additional_chat_templates/rag.jinja"):
        (folder / name).write("{}")
    files = tokenizer_files(resolve_folder(f"{store}/model"))
    assert [name_in_folder(file) for file in files] == [
        "tokenizer.json",
        "additional_chat_templates/rag.jinja",
    ]
