"""1: a random rank killed at random moments: the final state is bitwise that of a run that was never killed.

Two trials, one with saves in the background; `make faults` makes a hundred (kill_trials.py).
"""

import json

import pytest
from kill_trials import main


@pytest.mark.fault(1)
def test_a_run_killed_at_random_moments_ends_as_one_that_never_was(tmp_path):
    sums = tmp_path / "sums.json"
    assert main(["--trials", "2", "--steps", "6", "--seed", "51", "--json", str(sums)]) == 0
    found = json.loads(sums.read_text())
    assert (found["trials"], found["losses"]) == (2, 0) and found["kills"] >= 2
