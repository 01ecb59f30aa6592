"""The records of the GPU tests in git: the last whole run, and, if there is one, a later run that missed a few tests.

The README names both. Code for GPUs has changed in few commits since the later one.
"""

import ast
import importlib.util
import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORD = json.loads((ROOT / "tests" / "gpu" / "record.json").read_text())
LATER = ROOT / "tests" / "gpu" / "latest.json"
LATEST = json.loads(LATER.read_text()) if LATER.exists() else RECORD
CODE_FOR_GPUS = [f"megalith/{folder}" for folder in ("compat", "ops", "parallel", "generation", "optim")]
MOST_COMMITS = 40  # that may change this code before the GPU tests have to be run again


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_record_is_of_a_whole_run_without_a_failure():
    assert RECORD["whole"] and not RECORD["failed"]
    assert sum(counts["passed"] for counts in RECORD["files"].values()) > 500
    assert not any(counts["not_reached"] for counts in RECORD["files"].values())


def test_the_readme_names_the_record():
    text = " ".join((ROOT / "README.md").read_text().split())
    gpus = f"{len(RECORD['gpus'])} × {RECORD['gpus'][0]}"
    for figure in (RECORD["date"], gpus, f"torch {RECORD['torch']}", f"commit {RECORD['commit'][:8]}"):
        assert figure in text, figure


def test_a_later_run_had_no_failure_and_reached_nearly_all_tests():
    counts = Counter()
    for each in LATEST["files"].values():
        counts.update(each)
    total = counts["passed"] + counts["skipped"] + counts["not_reached"]
    assert not LATEST["failed"] and not counts["failed"]
    assert counts["not_reached"] == len(LATEST.get("not_reached", ())) <= total / 100
    if LATEST is not RECORD:
        text = " ".join((ROOT / "README.md").read_text().split())
        commit = LATEST.get("mended", LATEST)["commit"]
        assert f"commit {commit[:8]}" in text and f"{counts['passed']} of {total} tests passed" in text


class WithoutText(ast.NodeTransformer):
    """Replaces docstrings and messages: strings with a space."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant(" ") if isinstance(node.value, str) and " " in node.value else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        texts = [part.value for part in node.values if isinstance(part, ast.Constant)]
        return ast.Constant(" ") if any(" " in text for text in texts) else node


def code_of(source: str) -> str:
    """Return Python source without comments, docstrings and messages."""
    return ast.dump(WithoutText().visit(ast.parse(source)))


def changes_code(commit: str) -> bool:
    """Return True if a commit changes more of the code for GPUs than comments, docstrings and messages."""
    names = git("diff-tree", "--no-commit-id", "--name-status", "-r", commit, "--", *CODE_FOR_GPUS)
    for status, name in (line.split("\t") for line in names.splitlines()):
        if status != "M" or not name.endswith(".py"):
            return True
        if code_of(git("show", f"{commit}~:{name}")) != code_of(git("show", f"{commit}:{name}")):
            return True
    return False


def test_messages_docstrings_and_comments_are_not_code():
    code = 'def f(x):\n    """Add 1."""\n    if x < 0:\n        raise ValueError(f"{x} is < 0")\n    return d["key"]\n'
    assert code_of(code) == code_of(
        code.replace("Add 1.", "Add one.").replace("is < 0", "is negative") + "# x\n"
    )
    for change in (("x < 0", "x < 1"), ('"key"', '"value"'), ("ValueError", "TypeError")):
        assert code_of(code) != code_of(code.replace(*change)), change


def test_code_for_gpus_has_changed_in_few_commits_since():
    try:
        git("merge-base", "--is-ancestor", LATEST["commit"], "HEAD")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this checkout lacks the history since the record")
    commits = git("rev-list", f"{LATEST['commit']}..HEAD", "--", *CODE_FOR_GPUS).split()
    changed = len(commits)
    if changed > MOST_COMMITS:
        changed = sum(map(changes_code, commits))
    assert changed <= MOST_COMMITS, (
        f"{changed} commits have changed {', '.join(CODE_FOR_GPUS)} since the GPU tests ran at "
        f"{LATEST['commit'][:8]}; run tests/gpu/run.py with --record tests/gpu/record.json on a machine with GPUs"
    )


@pytest.fixture(scope="module")
def runner():
    """tests/gpu/run.py as a module."""
    spec = importlib.util.spec_from_file_location("gpu_run", ROOT / "tests" / "gpu" / "run.py")
    runner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runner)
    return runner


@pytest.mark.parametrize("count", [1, 2, 4])
def test_no_client_of_mps_runs_the_tests_that_kill_ranks(runner, count):
    hangs = str(ROOT / "tests" / "gpu" / "test_hang_gpu.py")
    jobs = [job for stage in runner.with_mps(runner.stages("0123"[:count], 10)) for job in stage]
    assert [hangs in job.options for job in jobs].count(True) == 1
    for job in jobs:
        assert not job.mps or f"--ignore={hangs}" in job.options


def test_the_mps_daemon_serves_all_gpus_under_their_own_numbers(runner, tmp_path, monkeypatch):
    daemon, seen = tmp_path / runner.MPS, tmp_path / "seen"
    daemon.write_text(f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES|$CUDA_MPS_PIPE_DIRECTORY" >> {seen}\n')
    daemon.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with runner.mps_daemon() as environment:
        folder = environment["CUDA_MPS_PIPE_DIRECTORY"]
    assert seen.read_text().splitlines() == [f"|{folder}"] * 2


def test_a_resumed_run_of_the_gpu_tests_runs_what_was_not_reached(runner, tmp_path):
    run = {"commit": "abc", "date": "2026-01-01", "gpus": ["X"], "torch": "2.11", "python": "3.12"}
    with pytest.raises(ValueError, match="no logs of a run to resume"):
        runner.prepare_logs(tmp_path, run, resume=True)
    runner.prepare_logs(tmp_path, run, resume=False)
    assert (tmp_path / "done.txt").read_text() == ""
    entries = [
        {"collected": ["a.py::passes", "a.py::fails", "a.py::late"]},
        {"test": "a.py::passes", "outcome": "passed", "seconds": 1.0},
        {"test": "a.py::fails", "outcome": "failed", "seconds": 1.0},
    ]
    (tmp_path / "one_gpu.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    runner.prepare_logs(tmp_path, run | {"date": "2026-01-02"}, resume=True)
    assert (tmp_path / "done.txt").read_text().split() == ["a.py::passes", "a.py::fails"]
    later = run | {"commit": "def"}
    with pytest.raises(ValueError, match="had commit abc, this one has def"):
        runner.prepare_logs(tmp_path, later, resume=True)
    mended = {"commit": "def", "failed_before": ["a.py::fails"]}
    assert runner.prepare_logs(tmp_path, later, resume=False, mended=True) == run | {"mended": mended}
    assert (tmp_path / "done.txt").read_text() == ""  # the whole file of the failure runs again
    with open(tmp_path / "one_gpu.jsonl", "a") as log:
        log.write(json.dumps({"test": "a.py::fails", "outcome": "passed", "seconds": 1.0}) + "\n")
    assert runner.prepare_logs(tmp_path, later, resume=True) == run | {"mended": mended}
    assert (tmp_path / "done.txt").read_text().split() == ["a.py::passes", "a.py::fails"]
    with pytest.raises(ValueError, match="had commit def, this one has abc"):
        runner.prepare_logs(tmp_path, run, resume=True)
    runner.prepare_logs(tmp_path, run, resume=False)
    assert runner.outcomes(tmp_path) == ({}, [], [])
