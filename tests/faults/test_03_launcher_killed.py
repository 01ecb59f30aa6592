"""3: a launcher that is killed, and the store that the ranks met at with it: no rank is left behind.

A killed background saver is a killed rank: test_storage_kill.py and kill_trials.py.
"""

import signal
import time

from ranks import Ranks, is_running, launch, steps, until, words, workers_of


def test_ranks_end_with_their_launcher(tmp_path):
    output = tmp_path / "run"
    launcher = launch(words(output, train__train_iters=100_000), "--nproc", "2", log=tmp_path / "log")
    try:
        until(lambda: len(steps(output)) >= 3, "step 3")
        pids = workers_of(launcher)
        assert len(pids) == 2
    finally:
        launcher.kill()
        launcher.wait()
    killed = time.monotonic()
    until(lambda: not any(map(is_running, pids)), "the end of the ranks", within=15)
    assert time.monotonic() - killed < 15


def test_ranks_end_when_the_one_that_holds_the_store_is_killed(tmp_path):
    output = tmp_path / "run"
    running = Ranks(words(output, train__train_iters=100_000), 2, tmp_path / "log")
    until(lambda: len(steps(output)) >= 3, "step 3")
    running.send(signal.SIGKILL, [0])
    codes = running.end(within=30)
    assert codes[0] == -signal.SIGKILL and codes[1] == 1
    assert "by peer" in running.text(1)
