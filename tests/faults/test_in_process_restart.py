"""Ranks that fail are replaced while the others stay in their processes, and the run ends as one without failures."""

import re
from pathlib import Path

import pytest
from in_process_trials import happened, left_by, restarts, run
from ranks import events, steps

STEPS = 13  # with snapshots every 2 steps, checkpoints every 5, evaluations every 4


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a function from a layout to what its run leaves without failures."""
    results = {}

    def left(layout: str) -> tuple:
        if layout not in results:
            output = tmp_path_factory.mktemp("undisturbed") / "run"
            run(output, layout, STEPS, [])
            results[layout] = left_by(output, STEPS)
        return results[layout]

    return left


def check(
    output: Path, layout: str, failures: list, undisturbed, limit: float | None = None, **settings
) -> tuple:
    """Run a job with failures and compare what it leaves. Return its numbers of replaced ranks and full restarts."""
    text = run(output, layout, STEPS, failures, limit, **settings)
    assert left_by(output, STEPS) == undisturbed(layout), text
    assert happened(output) == len(failures), text
    return restarts(text)


def test_ranks_killed_in_a_step_a_copy_and_a_restart_change_nothing(tmp_path, undisturbed):
    failures = [
        (2, "step", 6, "kill"),
        (1, "restore", 1, "kill"),  # in the restart after it
        (0, "exchange", 9, "kill"),  # rank 0, while partners exchange their copies
    ]
    assert check(tmp_path / "run", "sharded", failures, undisturbed) == (3, 0)


def test_a_restart_that_takes_too_long_becomes_a_restart_of_all_processes(tmp_path, undisturbed):
    failures = [(3, "step", 7, "kill"), (3, "restore", 1, "sleep")]
    assert check(tmp_path / "run", "sharded", failures, undisturbed, limit=5.0) == (1, 1)
    text = (tmp_path / "run.log").read_text()
    assert re.search(
        r"error: rank \d: the ranks did not all train again in time .*\nrestarting \(2 of 9\)", text
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "layout, failures",
    [
        ("data", [(2, "copy", 3, "kill")]),
        ("data", [(2, "copy", 3, "kill after")]),
        ("data", [(1, "exchange", 4, "kill after")]),
        ("data", [(3, "intact", 3, "kill after")]),
        ("data", [(1, "step", 8, "kill"), (2, "fetch", 1, "kill")]),
        ("data", [(1, "step", 8, "kill"), (0, "meeting", 2, "kill")]),
        ("data", [(1, "step", 8, "kill"), (3, "connecting", 2, "kill")]),
        ("data", [(1, "step", 8, "kill"), (3, "build", 2, "kill after")]),
        ("data", [(1, "step", 8, "raise")]),
        ("data", [(1, "step", 8, "abort")]),
        ("data", [(1, "evaluation", 2, "kill")]),
        ("data", [(1, "step", 2, "kill")]),  # before the first snapshot
        ("tensor × data", [(0, "step", 9, "kill"), (3, "step", 11, "kill")]),
        ("pipeline × tensor", [(3, "exchange", 4, "kill")]),
        ("context × data", [(0, "step", 5, "kill")]),
    ],
)
def test_a_failure_at_each_point_changes_nothing(tmp_path, undisturbed, layout, failures):
    assert check(tmp_path / "run", layout, failures, undisturbed) == (len(failures), 0)


UNHEALTHY = {
    "runtime__replace_unhealthy_ranks": True,
    "runtime__enable_straggler_detection": True,
    "runtime__straggler_interval": 2,
    "runtime__straggler_threshold": 3,
}


@pytest.mark.full
def test_a_rank_that_is_slow_twice_in_a_row_is_replaced_after_that_step_and_only_once(tmp_path, undisturbed):
    failures = [(2, "step", step, "slow") for step in (4, 6, 10, 12)]
    output = tmp_path / "run"
    text = run(output, "data", STEPS, failures, **UNHEALTHY)
    assert left_by(output, STEPS) == undisturbed("data"), text
    assert happened(output) == 4 and restarts(text) == (1, 0), text
    (event,) = events(output, "planned_replacement")
    assert (event["rank"], event["step"]) == (2, 6)
    assert "error: rank 2: its hardware is unhealthy" in text and "continuing from memory: step 6," in text
    assert steps(output) == list(range(1, STEPS + 1))


@pytest.mark.full
def test_an_unhealthy_rank_trains_on_if_no_restart_is_left(tmp_path, undisturbed):
    failures = [(1, "step", 2, "kill"), *((2, "step", step, "slow") for step in (4, 6))]
    output = tmp_path / "run"
    text = run(output, "data", STEPS, failures, max_restarts=1, **UNHEALTHY)
    assert left_by(output, STEPS) == undisturbed("data"), text
    assert restarts(text) == (1, 0) and len(events(output, "no_replacement")) == 1, text


@pytest.mark.full
@pytest.mark.parametrize("how", ["stop", "sleep"])
def test_a_rank_that_hangs_is_replaced(tmp_path, undisturbed, how):
    assert check(tmp_path / "run", "data", [(1, "step", 8, how)], undisturbed) == (1, 0)
    text = (tmp_path / "run.log").read_text()
    assert "error: rank 1: it made no progress, so its process was stopped\nreplacing rank 1" in text
    assert "SIGKILL" not in text and "start the job again" not in text


@pytest.mark.full
def test_a_rank_that_hangs_ends_the_job_with_its_code_if_no_restart_is_left(tmp_path):
    failures = [(2, "step", 4, "kill"), (1, "step", 8, "sleep")]
    with pytest.raises(AssertionError, match="exit code 6") as error:
        run(tmp_path / "run", "data", STEPS, failures, max_restarts=1)
    text = str(error.value)
    assert text.count("no progress within 12 s") == 1 and "rank 1: step 8, training" in text
    assert "error: rank 1: it made no progress, so its process was stopped\nfirst of the 2 failures: " in text


@pytest.mark.full
def test_a_rank_killed_during_a_background_save_changes_nothing(tmp_path, undisturbed):
    failures = [(0, "save", 2, "kill"), (2, "step", 12, "kill")]
    assert check(tmp_path / "run", "data", failures, undisturbed, checkpoint__async_save=True)[1] == 0


@pytest.mark.full
def test_a_restart_from_memory_does_not_read_the_storage(tmp_path, undisturbed):
    failures = [(2, "step", 12, "kill"), (0, "meeting", 2, "no storage")]
    output = tmp_path / "run"
    text = run(output, "data", STEPS, failures)
    assert left_by(output, STEPS) == undisturbed("data"), text
    assert happened(output) == 2 and restarts(text) == (1, 0) and "continuing from memory: step 10," in text


@pytest.mark.full
def test_spares_replace_the_ranks_and_end_with_the_job(tmp_path, undisturbed):
    failures = [(2, "step", 6, "kill"), (0, "step", 9, "kill")]
    assert check(tmp_path / "run", "data", failures, undisturbed, spares=1) == (2, 0)


@pytest.mark.full
def test_without_restarts_left_a_failure_ends_the_job(tmp_path):
    with pytest.raises(AssertionError, match="exit code 137"):
        run(tmp_path / "run", "data", STEPS, [(1, "step", 8, "kill")], max_restarts=0)
