"""A rank killed in any phase of a save of several ranks: a whole step is left, and no rank waits for the dead one."""

import json
import signal
from pathlib import Path

import forked
import pytest

HERE = Path(__file__).parent


@pytest.mark.fault(2)
def test_a_rank_killed_in_any_phase_of_a_save_leaves_the_newest_whole_step(tmp_path):
    done = forked.run([HERE / "storage_kill_job.py", tmp_path])
    assert done.returncode == 0, done.stdout + done.stderr
    trials = [json.loads(line) for line in done.stdout.splitlines()]
    killed = [trial for trial in trials if trial["codes"][trial["victim"]] != 0]
    assert len(killed) > 20 and {trial["victim"] for trial in killed} == {0, 1}
    for trial in killed:
        victim = trial["victim"]
        assert trial["codes"][victim] in (-signal.SIGKILL, -signal.SIGXFSZ), trial
        assert trial["codes"][1 - victim] in (0, 3), trial  # it ended by itself, done or with an error
        assert trial["found"] == (2 if "step_00000002" in trial["remains"] else 1), trial
    assert {trial["found"] for trial in killed} == {1, 2}
