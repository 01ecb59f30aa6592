"""1: a random rank killed at random moments: the final state is bitwise that of a run that was never killed.

One trial, two among all tests, the second with saves in the background; `make faults` makes a hundred (kill_trials.py).
"""

import json

import pytest
from kill_trials import main


@pytest.mark.fault(1)
@pytest.mark.parametrize("trials", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_run_killed_at_random_moments_ends_as_one_that_never_was(tmp_path, trials):
    sums = tmp_path / "sums.json"
    assert main(["--trials", str(trials), "--steps", "6", "--seed", "51", "--json", str(sums)]) == 0
    found = json.loads(sums.read_text())
    assert (found["trials"], found["losses"]) == (trials, 0) and found["kills"] >= trials
