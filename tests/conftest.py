"""Fixtures of the whole suite."""

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fault_items import FaultItems
from trained_runs import configuration

import megalith
from megalith.data.preprocessing.preprocess import preprocess
from megalith.data.tokenizers.open_tokenizer import build_tokenizer
from megalith.launch.pool import PRELOADED, Pool

torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other
# Every process that is forked from then on has them: a second less each time.
PRELOADED += ["megalith.training.trainer", "megalith.cli.main", "megalith.launch.agent", "pytest"]
if not torch.cuda.is_available():  # should importing the compiler start CUDA, what is forked could not use it
    PRELOADED.append("torch._inductor.compile_fx")
COMPILING = "test_compiled_layers.py", "test_fused.py", "test_inductor.py"
LONGEST = "faults", "optim", "parallel", "parity"  # these come first: no worker ends long before another


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FaultItems(config), "fault_items")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # torch and the tests are no garbage: a sixth of the time went into looking
    gc.set_threshold(50_000, 20, 50)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent.name not in LONGEST)
    for item in items:
        if item.path.parent.name in ("faults", "launch") or {"pool", "pool_of_eight"} & set(
            item.fixturenames
        ):
            item.add_marker("processes")
        if item.path.name in COMPILING or any(
            word in item.name for word in ("compiled", "traced", "one_graph")
        ):
            item.add_marker("compiled")


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
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool_of_eight() -> Iterator[Pool]:
    """For what four processes cannot show."""
    pool = Pool(8, timeout=200)
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
    """torch.compile with plain, unoptimized C++: the same arithmetic, in a fraction of the compiler's time."""
    plain = {"aot_inductor.debug_compile": True, "cpp.vec_isa_ok": False, "compile_threads": 1}
    with torch._inductor.config.patch(plain):
        yield
    torch._dynamo.reset()
