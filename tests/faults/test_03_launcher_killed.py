"""3: the host of the store that the ranks met at is killed: no rank is left behind.

A killed launcher: test_17_fewer_workers.py. A killed background saver is a killed rank: test_storage_kill.py and
kill_trials.py.
"""

import os
import signal
import subprocess
import sys

import pytest
from forked import is_running
from ranks import Ranks, launch, steps, until, words, workers_of

from megalith.launch.failure import COLLECTIVE_WORDS


@pytest.mark.fault(3)
def test_ranks_end_when_the_one_that_holds_the_store_is_killed(tmp_path):
    output = tmp_path / "run"
    running = Ranks(words(output, train__train_iters=100_000), 2, tmp_path / "log")
    until(lambda: len(steps(output)) >= 3, "step 3")
    running.send(signal.SIGKILL, [0])
    codes = running.end()
    assert codes[0] == -signal.SIGKILL and codes[1] == 1
    assert any(words in running.text(1) for words in COLLECTIVE_WORDS), running.text(1)


def test_a_launcher_killed_while_its_ranks_start_leaves_none_behind(tmp_path):
    command = words(tmp_path / "run", train__train_iters=100_000)
    launcher = launch(command, "--nproc", "2", log=tmp_path / "log")
    try:
        until(lambda: len(workers_of(launcher)) == 2, "two ranks")
        ranks = workers_of(launcher)
    finally:
        launcher.kill()
        launcher.wait()
    until(lambda: not any(map(is_running, ranks)), "the end of the ranks")


def test_a_rank_whose_launcher_is_gone_before_its_first_line_ends():
    """The parent of this process is alive, and is not the one that the environment names."""
    command = "import os; from megalith.launch.parent import *; exit_with_launcher(); print(os.environ.get(LAUNCHER))"
    for launcher, code, said in ((os.getpid(), 0, "None\n"), (1, 1, "")):
        environment = {**os.environ, "MEGALITH_LAUNCHER": str(launcher)}
        words = [sys.executable, "-c", command]
        ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stdout) == (code, said), ended.stderr
