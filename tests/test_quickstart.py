"""The README's two commands in their order: what `make train` leaves in a checkout is nothing to the tests."""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from forked import open_forkserver
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megalith.cli.main import main
from megalith.report.metrics import read_records

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"

SHORTER = {
    "tokenizer": ["--vocab-size", "300"],
    "preprocess": ["--workers", "0"],
    "train": ["--train.train_iters", "3", "--optim.lr_warmup_iters", "1", "--train.eval_iters", "1",
              "--model.num_layers", "1", "--model.hidden_size", "32", "--data.num_workers", "0"],
    "generate": ["--max-new-tokens", "4"],
}  # fmt: skip


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A copy of this checkout as it was cloned, with its environment ready; the working folder."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("Makefile", "README.md", "pyproject.toml", "constraints.txt", "requirements.lock"):
        shutil.copy2(ROOT / name, folder)
    for name in ("examples", "tests"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / ".venv").mkdir()
    (folder / ".venv" / "ready").touch()
    monkeypatch.chdir(folder)
    return folder


def commands_of(goal: str) -> list[list[str]]:
    """What make would run for `goal`, in order, without what keeps an earlier run, and as if no make ran above it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    listed = subprocess.run(
        ["make", "-n", goal], capture_output=True, text=True, check=True, env=environment
    ).stdout
    lines = [shlex.split(line) for line in listed.replace("\\\n", " ").splitlines()]
    return [words for words in lines if words[0] != "test"]


class FewImports:
    """Plugin of pytest that notes the test files it comes to, and imports only those of tests/config."""

    def __init__(self):
        self.files: set[str] = set()

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        if collection_path.is_dir():
            return None
        if collection_path.match("test_*.py"):
            self.files.add(collection_path.name)
        return None if collection_path.parent.name == "config" else True


def collect(checkout: Path) -> None:
    """End with pytest's exit code after `make test` has found its tests, which it does not run; with 6 for others.

    Importing every test file would take half a minute.
    """
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(f"{TESTS}/"):
            del sys.modules[name]  # the copy has modules of these names
    sys.path[:] = [path for path in sys.path if not Path(path).is_relative_to(TESTS)]
    few = FewImports()
    words = ["--collect-only", "-qq", "--assert=plain", "-p", "no:cacheprovider", str(checkout / "tests")]
    code = pytest.main(words, plugins=[few])
    sys.exit(code or 6 * (few.files != {path.name for path in TESTS.rglob("test_*.py")}))


def test_the_lock_has_a_version_and_hashes_of_each_requirement_of_the_tests():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "requirements.lock").read_text().replace("\\\n", "")
    pinned = {}
    for line in text.splitlines():
        requirement, *hashes = line.split(" --hash=sha256:")
        one = Requirement(requirement)
        assert len(hashes) >= 1 and all(len(each.strip()) == 64 for each in hashes), line
        if one.marker is None or one.marker.evaluate():
            assert one.name not in pinned, one.name
            pinned[one.name] = next(iter(one.specifier)).version
    needed = map(Requirement, project["dependencies"] + project["optional-dependencies"]["test"])
    for requirement in needed:
        if requirement.name not in ("torch", "triton"):  # pinned in constraints.txt and in the Makefile
            assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


@pytest.mark.processes
def test_make_train_and_then_make_test(checkout, monkeypatch, tmp_path):
    (tmp_path / "stdlib").mkdir()
    for source in Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"):
        shutil.copy(source, tmp_path / "stdlib")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "stdlib"))
    commands = commands_of("train")
    assert [words[0] for words in commands] == [".venv/bin/megalith"] * 7
    for _, command, *words in commands:
        assert main([command, *words, *SHORTER.get(command, [])]) == 0, (command, words)
    assert len(read_records("runs/quickstart/metrics.jsonl")) == 3 and Path("data/tokenizer.json").is_file()
    assert commands_of("test")[-1][:4] == [".venv/bin/python", "-m", "pytest", "tests"]
    collecting = open_forkserver().Process(target=collect, args=(checkout,))
    collecting.start()
    collecting.join()
    assert collecting.exitcode == 0


def test_make_train_keeps_an_earlier_run(checkout):
    """With a stand-in for megalith, which notes how it is called."""
    (checkout / "data").mkdir()
    for name in ("stdlib.jsonl", "tokenizer.json", "stdlib_text_document.idx"):
        (checkout / "data" / name).touch()
    program = checkout / ".venv" / "bin" / "megalith"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nmkdir -p runs/quickstart\n")
    program.chmod(0o755)
    (checkout / "runs" / "quickstart").mkdir(parents=True)
    (checkout / "runs" / "quickstart" / "loss").write_text("mine")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    subprocess.run(["make", "train"], check=True, env=environment, capture_output=True)
    kept = list((checkout / "runs").glob("quickstart-*/loss"))
    assert [path.read_text() for path in kept] == ["mine"]
    assert not (checkout / "runs" / "quickstart" / "loss").exists()


def test_the_readme_shows_what_make_train_runs(checkout):
    shown = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    for _, command, *words in commands_of("train"):
        if command == "plot":
            continue
        lines = [
            shlex.split(line)[1:] for line in shown.splitlines() if line.startswith(f"megalith {command} ")
        ]
        assert any(line and set(line) <= {command, *words} for line in lines), (command, words)


def test_every_test_runs_in_an_empty_folder_of_its_own():
    assert not Path.cwd().is_relative_to(ROOT) and not list(Path.cwd().iterdir())
