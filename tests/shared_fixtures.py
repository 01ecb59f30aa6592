"""Fixtures of the whole suite."""

import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from forked import ForkedPopen, open_forkserver
from trained_runs import configuration

import megalith
from megalith.data.preprocessing.preprocess import preprocess
from megalith.data.tokenizers.open_tokenizer import build_tokenizer
from megalith.launch.pool import Pool

torch.set_num_threads(1)  # the models are too small for threads
os.fsync = (
    os.fstat
)  # tests end processes, not machines; warm.py does the same for the processes that they start
IDLE_SECONDS = 0.5
PLAIN_CPP = {  # unoptimized C++ for the CPU: the same arithmetic, compiled much faster
    "TORCHINDUCTOR_VEC_ISA_OK": "0",
    "AOT_INDUCTOR_DEBUG_COMPILE": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
if not torch.cuda.is_available():
    os.environ |= PLAIN_CPP | {name: os.environ[name] for name in PLAIN_CPP if name in os.environ}


@pytest.fixture(scope="session", autouse=True)
def nothing_around(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use an empty working folder for session fixtures and the processes that they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("nothing"))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_thread_left_busy() -> Iterator[None]:
    """Fail if a test has left a thread that computes without end, which slows down all tests after it."""
    yield
    before = time.process_time()
    time.sleep(IDLE_SECONDS)
    seconds = time.process_time() - before
    frames = ["".join(traceback.format_stack(frame)) for frame in sys._current_frames().values()]
    assert seconds < IDLE_SECONDS / 10, f"{seconds:.2f} s of processor time while idle:\n" + "\n".join(frames)


class EmptyFolder:
    """An empty folder, which is replaced when a test has left something in it."""

    def __init__(self, factory: pytest.TempPathFactory):
        self._factory, self._path = factory, factory.mktemp("empty")

    def path(self) -> Path:
        with os.scandir(self._path) as entries:
            if any(entries):
                self._path = self._factory.mktemp("empty")
        return self._path


@pytest.fixture(scope="session")
def empty_folder(tmp_path_factory: pytest.TempPathFactory) -> EmptyFolder:
    return EmptyFolder(tmp_path_factory)


@pytest.fixture(autouse=True)
def own_folder(
    request: pytest.FixtureRequest, empty_folder: EmptyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run every test in its `tmp_path`, so that relative paths never refer to the checkout.

    Tests without one run in an empty folder: making and removing a folder took 4 ms per test.
    """
    has_folder = "tmp_path" in request.fixturenames
    monkeypatch.chdir(request.getfixturevalue("tmp_path") if has_folder else empty_folder.path())


@pytest.fixture(scope="session")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import modules and train two steps in this process, so that its forks need not."""
    for name in ("torch.distributed.run", "transformers.models.llama.modeling_llama", "megalith.accelerate"):
        importlib.import_module(name)
    folder = tmp_path_factory.mktemp("warm")
    model = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 64}
    train = {"train_iters": 2, "micro_batch_size": 1, "global_batch_size": 1, "output_dir": str(folder)}
    tree = {"model": model, "data": {"mock": True, "seq_length": 16, "num_workers": 0}, "train": train}
    megalith.train(megalith.RunConfig.from_tree(tree | {"optim": {"lr": 1e-3}, "runtime": {"device": "cpu"}}))


@pytest.fixture
def forked_programs(monkeypatch: pytest.MonkeyPatch, warmed: None) -> None:
    """Fork the Python programs that this process and its launchers start, instead of starting new processes."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    for module in (subprocess, subprocess_handler):
        monkeypatch.setattr(module, "Popen", ForkedPopen)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Provide four processes shared by all tests; `pool.run(function, *args, size=2)` uses the first two."""
    open_forkserver()
    pool = Pool(4, timeout=600)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool_of_eight() -> Iterator[Pool]:
    """Provide eight processes, for layouts that need more than four."""
    open_forkserver()
    pool = Pool(8, timeout=600)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write an indexed dataset of 60 short documents, as bytes with EOD; return its prefix."""
    folder = tmp_path_factory.mktemp("corpus")
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "dog"]
    texts = [" ".join(words[(i * j + j) % len(words)] for j in range(1, 12 + i % 9)) for i in range(60)]
    source = folder / "corpus.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = build_tokenizer("ByteTokenizer")
    summary = preprocess(
        [source], folder / "corpus", tokenizer, append_eod=True, workers=0, show_progress=False
    )
    return str(Path(summary.prefixes[0]))


@pytest.fixture
def run(corpus, tmp_path) -> Iterator[Callable]:
    """Provide `run("name", section={key: value})`, which trains a small GPT into tmp_path/name; returns the result."""

    def run(name: str = "run", **sections):
        return megalith.train(configuration(corpus, tmp_path / name, **sections))

    yield run
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def quick_compile() -> Iterator[None]:
    """Reset torch.compile's caches after the test, so that they do not slow down later ones."""
    yield
    torch._dynamo.reset()
