"""Runs whose output folder is on a network disk (network_disk.py) that is slow, hangs, goes stale, is over its quota or
becomes read-only: training goes on while it can, and what the run leaves after a restart is what it leaves without."""

import errno
import os
from contextlib import contextmanager

import pytest
from network_disk import MountedDisk
from ranks import Ranks, records, saved, steps, stored, until, words

from megalith.checkpoint import list_steps
from megalith.checkpoint.open import step_problems

pytestmark = pytest.mark.full
END = 12


def job(output, end: int = END, **settings) -> list[str]:
    wanted = {"checkpoint__save_interval": 2, "checkpoint__async_save": True, **settings}
    return words(output, train__train_iters=10**6, train__exit_interval=end, **wanted)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    assert Ranks(job(output), 2, output.with_suffix(".log")).end() == [20, 20]
    return left(output)


def left(output) -> tuple:
    figures = [(each["step"], each["loss"], each["grad_norm"]) for each in records(output / "metrics.jsonl")]
    return stored(output, END), figures


@pytest.fixture
def disk(tmp_path):
    try:
        mounted = MountedDisk(tmp_path).__enter__()
    except OSError as error:
        pytest.skip(f"FUSE is not permitted here: {error}")
    yield mounted
    mounted.__exit__()


@contextmanager
def running(output, log, end: int = 10**6, **settings):
    """A job that goes on until it is stopped."""
    ranks = Ranks(job(output, end, **settings), 2, log)
    try:
        until(lambda: saved(output), "a checkpoint", within=300)
        yield ranks
    finally:
        ranks.kill()


def goes_on(output, log, seconds: float = 300) -> None:
    """Wait for a newer checkpoint."""
    before = saved(output)
    until(lambda: saved(output)[-1] > before[-1], f"a checkpoint after {before[-1]}\n{log()}", within=seconds)


def resumed(output, tmp_path, undisturbed) -> None:
    """Continue a job that has ended before END, and compare what it leaves."""
    again = Ranks(job(output), 2, tmp_path / "again")
    assert again.end() == [20, 20], again.text()
    assert "resuming from" in again.text(0)
    assert left(output) == undisturbed


def test_a_slow_disk_changes_nothing_but_the_time(tmp_path, disk, undisturbed):
    disk.set(seconds=0.01)  # per operation; a save makes about a hundred
    ranks = Ranks(job(disk.path / "run"), 2, tmp_path / "log")
    assert ranks.end() == [20, 20], ranks.text()
    assert left(disk.path / "run") == undisturbed
    assert "warning" not in ranks.text()


def test_a_disk_that_hangs_is_waited_for(tmp_path, disk):
    output = disk.path / "run"
    with running(output, tmp_path / "log", runtime__distributed_timeout_minutes=0.1) as ranks:
        disk.set(hangs=True)
        for process in ranks.processes:
            process.join(9)  # longer than the ranks' time-out; nobody can read the folder meanwhile
        assert [process.exitcode for process in ranks.processes] == [None, None], ranks.text()
        disk.set()
        goes_on(output, ranks.text)
        assert "warning" not in ranks.text() and "error" not in ranks.text()


def test_a_server_that_restarts_leaves_stale_handles_which_are_opened_again(tmp_path, disk):
    output = disk.path / "run"
    with running(output, tmp_path / "log", checkpoint__max_failed_saves=9) as ranks:
        disk.set(generation=1)
        goes_on(output, ranks.text)
        last = int(saved(output)[-1].removeprefix("step_"))
        until(lambda: last in steps(output), f"metrics of step {last}:\n{ranks.text()}", within=60)
        assert "Stale file handle" in ranks.text()
    assert steps(output) == list(range(1, steps(output)[-1] + 1))
    folder = list_steps(output / "checkpoints")[int(saved(output)[-1].removeprefix("step_"))]
    assert step_problems(folder) == []


@pytest.mark.parametrize(
    "number", [errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EIO], ids=errno.errorcode.get
)
def test_a_disk_that_refuses_for_a_while_costs_those_saves_alone(tmp_path, disk, number):
    output = disk.path / "run"
    with running(output, tmp_path / "log", checkpoint__max_failed_saves=10**6) as ranks:
        disk.set(errors={"modify": number})
        until(lambda: ranks.text(0).count("could not be saved") > 1, "two failed saves", within=300)
        disk.set()
        goes_on(output, ranks.text)
        assert os.strerror(number) in ranks.text(0)
        last = int(saved(output)[-1].removeprefix("step_"))
        until(lambda: last in steps(output), f"metrics of step {last}", within=60)
    assert steps(output) == list(range(1, steps(output)[-1] + 1))
    for folder in list_steps(output / "checkpoints").values():
        assert step_problems(folder) == []


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EROFS, errno.ESTALE], ids=errno.errorcode.get)
def test_a_disk_that_refuses_for_good_ends_the_run_which_resumes_without_loss(
    tmp_path, disk, undisturbed, number
):
    output = disk.path / "run"
    first = Ranks(job(output, 4), 2, tmp_path / "log")
    assert first.end() == [20, 20], first.text()
    disk.set(errors={"write": number})
    refused = Ranks(job(output, checkpoint__max_failed_saves=2), 2, tmp_path / "refused")
    assert set(refused.end()) <= {1, 2, 4}, refused.text()
    assert os.strerror(number) in refused.text() and "Traceback" not in refused.text(0)
    disk.set()
    assert saved(output)[-1] == "step_00000004"
    resumed(output, tmp_path, undisturbed)
