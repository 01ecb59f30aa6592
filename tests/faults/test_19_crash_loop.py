"""19: a job that fails again and again: pauses that grow, an end, and the first traceback kept."""

import time
from functools import partial
from pathlib import Path

import pytest
from ranks import Ranks, steps, until, words

from megalith.launch.launcher import launch
from megalith.launch.restart import FAILURES, Attempt, pause
from megalith.training.run_state import Run

ALWAYS_FAILS = """
import os, sys
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
from megalith.launch.failure import report
try:
    raise ZeroDivisionError(f"the error of attempt {attempt}")
except ZeroDivisionError as error:
    report(error)
"""


@pytest.mark.fault(19)
def test_the_launcher_ends_after_so_many_restarts_and_tells_the_first_failure_too(tmp_path, capfd):
    script = tmp_path / "fails.py"
    script.write_text(ALWAYS_FAILS)
    assert launch(1, [str(script)], max_restarts=2) == 1
    told = capfd.readouterr().err
    assert told.index("the error of attempt 0") < told.index("restarting (1 of 2)")
    assert told.index("the error of attempt 1") < told.index("restarting (2 of 2)")
    last = told[told.index("restarting (2 of 2)") :]
    assert last.index("the error of attempt 2") < last.index("first of the 3 failures")
    assert "the error of attempt 0" in last and told.count("restarting") == 2


def test_pauses_double_up_to_a_minute():
    assert [pause(Attempt(number)) for number in range(9)] == [0, 1, 2, 4, 8, 16, 32, 60, 60]


def fail_after_step_2(rank: int, output: Path) -> None:
    inner = Run.train_step

    def train_step(self, *given):
        if self.step == 2 and rank == 1:
            until(lambda: steps(output) == [1, 2], "the other rank's record of step 2")
            raise ZeroDivisionError(f"on rank {rank}")
        return inner(self, *given)

    Run.train_step = train_step


@pytest.mark.fault(19, 25)
def test_each_attempt_waits_and_leaves_its_traceback_and_a_folder_of_another_job_is_refused(tmp_path):
    output = tmp_path / "run"
    command = words(output, train__train_iters=9)
    at = command.index("--checkpoint.load")
    del command[at : at + 2]
    for attempt in range(2):
        agent = {"TORCHELASTIC_RUN_ID": "a job", "TORCHELASTIC_RESTART_COUNT": str(attempt)}
        begun = time.monotonic()
        fail = partial(fail_after_step_2, output=output)
        running = Ranks(command, 2, tmp_path / f"log{attempt}", prepare=fail, environment=agent)
        assert running.end()[1] == 1, running.text()
        assert time.monotonic() - begun > attempt and steps(output) == [1, 2]
    kept = {path.name: path.read_text() for path in (output / FAILURES).iterdir()}
    assert {"attempt_000_rank_00001.txt", "attempt_001_rank_00001.txt"} <= kept.keys()
    assert "ZeroDivisionError: on rank 1" in kept["attempt_000_rank_00001.txt"]
    other = Ranks(command, 1, tmp_path / "other", environment={"TORCHELASTIC_RUN_ID": "another job"})
    assert other.end() == [2] and "holds another run" in other.text()
