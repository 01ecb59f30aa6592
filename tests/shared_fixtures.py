"""Fixtures of the whole suite."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from forked import open_forkserver
from trained_runs import configuration

import megalith
from megalith.data.preprocessing.preprocess import preprocess
from megalith.data.tokenizers.open_tokenizer import build_tokenizer
from megalith.launch.pool import Pool

torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other
PLAIN_CPP = {  # what is compiled for a CPU: the same arithmetic, unoptimized, in a fraction of the compiler's time
    "TORCHINDUCTOR_VEC_ISA_OK": "0",
    "AOT_INDUCTOR_DEBUG_COMPILE": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
if not torch.cuda.is_available():
    os.environ |= PLAIN_CPP | {name: os.environ[name] for name in PLAIN_CPP if name in os.environ}


@pytest.fixture(scope="session", autouse=True)
def nothing_around(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The working folder is an empty one, for the fixtures of the session and for what its processes start in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("nothing"))
        yield


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test works in its `tmp_path`: no name without a folder means something in the checkout."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four processes shared by every test; `pool.run(function, *args, size=2)` takes the first two."""
    open_forkserver()
    pool = Pool(4, timeout=600)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool_of_eight() -> Iterator[Pool]:
    """For what four processes cannot show."""
    open_forkserver()
    pool = Pool(8, timeout=600)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of an indexed dataset of 60 short documents, bytes with an end after each."""
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
    """Trains: `run("name", section={key: value})` into tmp_path/name, a small GPT on the tiny corpus; its result."""

    def run(name: str = "run", **sections):
        return megalith.train(configuration(corpus, tmp_path / name, **sections))

    yield run
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def quick_compile() -> Iterator[None]:
    """What is compiled here is forgotten behind the test, which no other one has to look through."""
    yield
    torch._dynamo.reset()
