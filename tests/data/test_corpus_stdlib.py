"""The default corpus: the standard library's own text."""

import json
import sysconfig
from pathlib import Path

import pytest

from megalith.data.preprocessing.corpus import write_stdlib_corpus
from megalith.errors import DataError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    summary = write_stdlib_corpus(path)
    return summary, [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_documents_are_the_modules_own_text(corpus):
    summary, documents = corpus
    root = Path(sysconfig.get_path("stdlib"))
    assert len(documents) == summary.documents > 300
    assert sum(len(d["text"].encode()) for d in documents) == summary.bytes > 5e6
    by_path = {document["path"]: document["text"] for document in documents}
    assert by_path["argparse.py"] == (root / "argparse.py").read_text(encoding="utf-8")
    assert "asyncio/base_events.py" in by_path


def test_tests_caches_and_installed_packages_are_left_out(corpus):
    parts = {part for document in corpus[1] for part in Path(document["path"]).parts}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "__pycache__"}


def test_the_last_documents_are_mixed(corpus):
    folders = {Path(document["path"]).parts[0] for document in corpus[1][-30:]}
    assert len(folders) > 10


def test_the_order_and_bytes_are_the_same_every_time(corpus, tmp_path):
    write_stdlib_corpus(tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == corpus[0].path.read_bytes()


def test_an_existing_file_is_kept_unless_overwritten(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("precious")
    with pytest.raises(DataError, match="already exists"):
        write_stdlib_corpus(path)
    assert path.read_text() == "precious"


def test_a_python_without_its_source_is_refused_and_nothing_is_written(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "empty"))
    with pytest.raises(DataError, match="has no source files"):
        write_stdlib_corpus(tmp_path / "corpus.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
