"""An output that takes no more (a closed pipe, a lost terminal, a full quota) ends no run."""

import os
import subprocess
import sys

import pytest
from ranks import Ranks, saved, steps, words


def full(rank: int) -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def broken(rank: int) -> None:
    end, pipe = os.pipe()
    os.close(end)
    os.dup2(pipe, 1)


def both_broken(rank: int) -> None:
    broken(rank)
    os.dup2(1, 2)


def closed(rank: int) -> None:
    os.close(1)
    sys.stdout = None  # as the interpreter has it then


def test_a_run_goes_on_to_its_end_whatever_becomes_of_its_output(tmp_path):
    running = {
        lose.__name__: Ranks(
            words(tmp_path / lose.__name__, train__train_iters=3),
            1,
            tmp_path / f"{lose.__name__}.log",
            prepare=lose,
        )
        for lose in (full, broken, both_broken, closed)
    }
    ended = {name: ranks.end() for name, ranks in running.items()}
    assert set(map(tuple, ended.values())) == {(0,)}, "".join(ranks.text() for ranks in running.values())
    for name in running:
        assert steps(tmp_path / name) == [1, 2, 3] and saved(tmp_path / name) == ["step_00000003"]
    for name, reason in (("full", "No space left on device"), ("broken", "Broken pipe")):
        told = running[name].text()
        assert told.count("warning: standard output cannot be written") == 1 and reason in told
    assert "warning" not in running["closed"].text()


PRINTS = """
import sys
from megalith.report.streams import guard_standard_streams
with guard_standard_streams():
    print("a line")
sys.exit(22)
"""


@pytest.mark.parametrize("kind", ["full", "broken", "good"])
def test_the_exit_code_is_the_runs_own_for_the_interpreters_last_flush_changes_nothing(kind):
    end, pipe = os.pipe()
    os.close(end)
    output = {"full": open("/dev/full", "w"), "broken": pipe, "good": subprocess.PIPE}[kind]  # noqa: SIM115
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", PRINTS], stdout=output, stderr=subprocess.PIPE, text=True, env=buffered
    )
    os.close(pipe)
    assert done.returncode == 22
    if kind == "good":
        assert (done.stdout, done.stderr) == ("a line\n", "")
    else:
        assert done.stderr.count("warning: standard output cannot be written") == done.stderr.count("\n") == 1
