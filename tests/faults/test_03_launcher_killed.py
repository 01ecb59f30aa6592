"""3: the host of the store that the ranks met at is killed: no rank is left behind.

A killed launcher: test_17_fewer_workers.py. A killed background saver is a killed rank: test_storage_kill.py and
kill_trials.py.
"""

import signal

import pytest
from ranks import Ranks, steps, until, words


@pytest.mark.fault(3)
def test_ranks_end_when_the_one_that_holds_the_store_is_killed(tmp_path):
    output = tmp_path / "run"
    running = Ranks(words(output, train__train_iters=100_000), 2, tmp_path / "log")
    until(lambda: len(steps(output)) >= 3, "step 3")
    running.send(signal.SIGKILL, [0])
    codes = running.end(within=30)
    assert codes[0] == -signal.SIGKILL and codes[1] == 1
    assert "by peer" in running.text(1)
