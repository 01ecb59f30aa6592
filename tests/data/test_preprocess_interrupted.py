"""A run that is killed or interrupted midway leaves nothing that looks whole, and no workers behind."""

import signal
import subprocess
import sys

import pytest
from default_cases import by_default

from megalith.data.indexed import IndexedDataset
from megalith.data.preprocessing.preprocess import preprocess
from megalith.data.tokenizers.open_tokenizer import build_tokenizer
from megalith.errors import DataError

SCRIPT = """
import os, signal, sys
from megalith.data.preprocessing.preprocess import preprocess
from megalith.data.tokenizers.plain import ByteTokenizer

class Stuck(ByteTokenizer):
    calls = 0

    def encode_batch(self, texts):
        Stuck.calls += 1
        if Stuck.calls == 3:
            print("midway", flush=True)
            if sys.argv[4] == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
        return super().encode_batch(texts)

if __name__ == "__main__":
    source, prefix, workers = sys.argv[1:4]
    preprocess([source], prefix, Stuck(), workers=int(workers), show_progress=False)
"""


@pytest.fixture
def start(tmp_path):
    source, script = tmp_path / "a.jsonl", tmp_path / "script.py"
    source.write_text('{"text": "some text to encode"}\n' * 50_000)
    script.write_text(SCRIPT)
    (tmp_path / "outputs").mkdir()
    started = []

    def start(workers, then="pause"):
        command = [sys.executable, script, source, tmp_path / "outputs" / "out", str(workers), then]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A job that a shell has put into the background ignores it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        started.append(process)
        assert process.stdout.readline() == "midway\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def assert_nothing_looks_whole(folder):
    assert [path for path in folder.iterdir() if path.suffix in (".bin", ".idx")] == []
    with pytest.raises(DataError):
        IndexedDataset(folder / "out_text_document")


@pytest.mark.processes
@pytest.mark.parametrize("workers", by_default([0, 1], 0))
def test_a_killed_run_leaves_no_dataset_and_no_worker(start, tmp_path, workers):
    process = start(workers)
    process.kill()
    process.stdout.read()  # ends when the last process that holds this pipe has ended
    assert process.wait() == -signal.SIGKILL
    assert_nothing_looks_whole(tmp_path / "outputs")
    source = tmp_path / "a.jsonl"
    options = {"workers": 0, "show_progress": False}
    summary = preprocess([source], tmp_path / "outputs" / "out", build_tokenizer("ByteTokenizer"), **options)
    assert IndexedDataset(summary.prefixes[0]).num_documents == 50_000


def test_an_interrupted_run_leaves_no_file_at_all(start, tmp_path):
    process = start(workers=0)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors
    assert list((tmp_path / "outputs").iterdir()) == []


def test_a_worker_that_dies_is_an_error_and_leaves_no_file(start, tmp_path):
    process = start(workers=1, then="die")
    _, errors = process.communicate()
    assert process.returncode != 0
    assert "one of 1 worker processes ended early" in errors
    assert list((tmp_path / "outputs").iterdir()) == []
