"""Datasets in an object store: the same bytes and the same samples as in a folder, and nothing read on trust."""

import gc
import gzip
import json
from typing import ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.spec import AbstractBufferedFile

from megalith.cli.main import main
from megalith.data import idx_format
from megalith.data.blend import build_datasets
from megalith.data.idx_format import HEADER, MAGIC
from megalith.data.indexed import IndexedDataset, IndexedWriter, merge
from megalith.errors import DataError
from megalith.remote import StorePath, open_location


@pytest.fixture
def bucket():
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    yield open_location("memory://data")
    memory.store.clear()


@pytest.fixture
def copied(bucket, corpus):
    """The corpus's two files in the store; the prefix there."""
    for ending in ("bin", "idx"):
        (bucket / f"corpus.{ending}").send(open_location(f"{corpus}.{ending}"))
    return f"{bucket}/corpus"


def test_every_sample_is_token_for_token_that_of_the_file_in_one_block_or_many(copied, corpus, monkeypatch):
    sizes = (100, 20, 20)
    local = build_datasets(corpus, "80,10,10", 16, sizes, 1)
    for block in (7, 64, 1 << 18):
        monkeypatch.setattr(idx_format, "BLOCK", block)
        remote = build_datasets(copied, "80,10,10", 16, sizes, 1)
        for ours, theirs in zip(remote, local):
            assert len(ours) == len(theirs)
            assert all(np.array_equal(ours[i], theirs[i]) for i in range(len(ours)))
    assert remote[0].indexed.identity() == local[0].indexed.identity()


def test_blocks_are_fetch_once_and_no_further_than_needed(copied, monkeypatch):
    monkeypatch.setattr(idx_format, "BLOCK", 64)
    asked, read = [], StorePath.read_range
    monkeypatch.setattr(
        StorePath, "read_range", lambda self, *at: asked.append((self.suffix, *at)) or read(self, *at)
    )
    dataset = IndexedDataset(copied)
    assert asked == [(".idx", 0, HEADER.size)]
    dataset.get(0, 0, 4), dataset.get(0, 2, 4)
    assert asked[1:] == [(".bin", 0, 64)]


def test_preprocess_reads_and_writes_urls_and_writes_what_it_writes_into_a_folder(bucket, tmp_path):
    lines = "".join(json.dumps({"text": f"document {i} " * i}) + "\n" for i in range(1, 30)).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (bucket / "in" / "a.jsonl").write(lines[: len(lines) // 2].rpartition(b"\n")[0])
    (bucket / "in" / "b.jsonl.gz").write(
        gzip.compress(lines[len(lines[: len(lines) // 2].rpartition(b"\n")[0]) + 1 :])
    )
    words = ["--tokenizer-type", "ByteTokenizer", "--append-eod", "--workers", "0"]
    assert main(["preprocess", "--input", "a.jsonl", "--output-prefix", "here", *words]) == 0
    url = ["preprocess", "--input", f"{bucket}/in/*", "--output-prefix", f"{bucket}/out", *words]
    assert main(url) == 0
    for ending in ("bin", "idx"):
        there = (bucket / f"out_text_document.{ending}").read_bytes()
        assert there == (tmp_path / f"here_text_document.{ending}").read_bytes()
    assert main(url) == DataError.exit_code and main([*url, "--overwrite"]) == 0
    merge([f"{bucket}/out_text_document"] * 2, f"{bucket}/merged")
    assert IndexedDataset(f"{bucket}/merged").num_documents == 58


def test_a_writer_that_fails_leaves_no_pair(bucket, monkeypatch):
    for error in (KeyError, DataError):
        with pytest.raises(error), IndexedWriter(f"{bucket}/x", np.uint16) as writer:
            writer.add_document([1, 2, 3])
            raise error
        assert not (bucket / "x.idx").exists()
    with IndexedWriter(f"{bucket}/x", np.uint16, overwrite=True) as writer:
        writer.add_document([1, 2, 3])
    monkeypatch.setattr(
        StorePath, "create", lambda self, size: (_ for _ in ()).throw(OSError(28, "quota", str(self)))
    )
    with pytest.raises(DataError, match=r"cannot write memory://data/x.bin: quota"):
        IndexedWriter(f"{bucket}/x", np.uint16, overwrite=True)


class Upload(AbstractBufferedFile):
    """A write whose discard fails because the store does not answer, although it answers later."""

    completed: ClassVar[list[bytes]] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        if final:
            self.completed.append(self.buffer.getvalue())
        return True

    def discard(self) -> None:
        raise OSError("the network is gone")


def test_an_object_whose_discard_fails_is_not_sent_by_garbage_collection(monkeypatch):
    class Store:
        open = staticmethod(lambda name, mode, block_size: Upload(None, name, mode, block_size))

    monkeypatch.setattr("megalith.remote._store", lambda scheme, process: Store)
    with pytest.raises(ZeroDivisionError), StorePath("s3://bucket/corpus.bin").create() as file:
        file.write(b"the first tokens")
        raise ZeroDivisionError
    del file
    gc.collect()
    assert Upload.completed == []
    with StorePath("s3://bucket/corpus.bin").create() as file:
        file.write(b"all tokens")
    assert Upload.completed == [b"all tokens"]


def test_what_is_missing_or_cannot_be_is_a_sentence_before_it_takes_room(copied, bucket, monkeypatch):
    with pytest.raises(
        DataError, match=r"memory://data/corpu.idx and .* not found.*did you mean memory://data/corpus"
    ):
        IndexedDataset(f"{bucket}/corpu")
    monkeypatch.setattr(StorePath, "fetch", lambda self, file: pytest.fail("it was fetched"))
    for sequences, told in ((2**60, "sequences and .* take"), (3, r"has 40 bytes, but its 3 sequences")):
        (bucket / "corpus.idx").write(HEADER.pack(MAGIC, 1, 8, sequences, 2) + bytes(6))
        with pytest.raises(DataError, match=told):
            IndexedDataset(copied)
    (bucket / "corpus.idx").write(b"")
    with pytest.raises(DataError, match=r"corpus.idx has 0 bytes, but the header alone takes"):
        IndexedDataset(copied)


def test_a_store_that_is_gone_or_an_object_cut_short_is_a_sentence(copied, bucket, monkeypatch):
    dataset = IndexedDataset(copied)
    (bucket / "corpus.bin").write(b"\0\0")
    with pytest.raises(DataError, match=r"memory://data/corpus.bin ends before byte .* truncated since"):
        dataset.get(5)

    def gone(self, *_):
        raise OSError(5, "no route to host", str(self))

    monkeypatch.setattr(StorePath, "read_range", gone)
    for ask in (lambda: dataset.get(20), lambda: IndexedDataset(copied)):
        idx_format._fetch.cache_clear()
        with pytest.raises(DataError, match=r"cannot read memory://.*: no route to host; check .*network"):
            ask()
