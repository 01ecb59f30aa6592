"""17, and elastic starts: a lost worker or machine leads to a new group that goes on with the same global batch."""

import os
import signal

import pytest
from forked import free_port, is_running
from ranks import (
    Ranks,
    launch,
    records,
    saved,
    steps,
    stored,
    until,
    words,
    workers_of,
)

from megalith.config import RunConfig
from megalith.config.rules.run_rules import check_training
from megalith.errors import ConfigError
from megalith.training.precheck import check_job


@pytest.mark.fault(17)
def test_a_killed_rank_is_started_again_from_the_newest_checkpoint_and_sigterm_reaches_the_ranks(tmp_path):
    output, log = tmp_path / "run", tmp_path / "log"
    command = words(output, train__train_iters=100_000, checkpoint__save_interval=5, checkpoint__keep_last=2)
    at = command.index("--checkpoint.load")
    del command[at : at + 2]  # a restart finds the folder by itself
    launcher = launch(command, "--nproc", "2", "--max-restarts", "1", log=log)
    try:
        until(lambda: saved(output), "a checkpoint")
        os.kill(workers_of(launcher)[1], signal.SIGKILL)
        until(lambda: "resuming from" in log.read_text(), "the restart")
        before = len(steps(output))  # which may be of before the kill: no more come of those
        until(lambda: len(steps(output)) > before, "another step")
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait() == 22, log.read_text()
    finally:
        launcher.kill()
        launcher.wait()
    told = log.read_text()
    assert "was ended by SIGKILL" in told and "restarting (1 of 1)" in told
    assert told.count("resuming from") == 1
    done = steps(output)
    assert done == list(range(1, len(done) + 1)) and saved(output)[-1] == f"step_{done[-1]:08d}"


@pytest.mark.full
@pytest.mark.fault(3, 17)
def test_a_machine_that_comes_late_is_taken_in_and_when_it_is_lost_the_job_of_one_goes_on(tmp_path):
    output, log = tmp_path / "run", tmp_path / "log"
    command = words(output, train__train_iters=100_000, checkpoint__save_interval=5, checkpoint__keep_last=2)
    port = free_port()
    options = ("--nproc", "1", "--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{port}")
    first = launch(command, *options, "--max-restarts", "2", log=log)
    second = None

    def both() -> str:
        return log.read_text() + (tmp_path / "log2").read_text()

    try:
        until(lambda: saved(output), "a checkpoint of the first alone")
        second = launch(command, *options, "--max-restarts", "2", log=tmp_path / "log2")
        until(lambda: "2 ranks = " in both(), "the job of two")
        until(lambda: both().count("resuming from") == 1, "the job of two, from the first's checkpoint")
        newest = saved(output)[-1]
        until(lambda: saved(output)[-1] > newest, "a checkpoint of the two")
        assert f"waiting at 127.0.0.1:{port}" in both()
        orphans = workers_of(second)
        second.kill()
        until(lambda: not any(map(is_running, orphans)), "the end of the lost launcher's rank")
        until(lambda: both().count("resuming from") == 2, "the job of one")
        before = len(steps(output))
        until(lambda: len(steps(output)) > before + 3, "more steps")
        first.send_signal(signal.SIGTERM)
        assert first.wait() == 22, log.read_text()
    finally:
        for launcher in filter(None, (first, second)):
            launcher.kill()
            launcher.wait()
    metrics = records(output / "metrics.jsonl")
    assert [record["global_batch_size"] for record in metrics] == [4] * len(metrics)
    assert [record["consumed_samples"] for record in metrics] == [4 * step for step in steps(output)]
    assert "data parallel 1 × accumulation 4" in log.read_text()


def test_a_group_of_fewer_than_model_parallelism_needs_is_refused_at_once(tmp_path):
    log = tmp_path / "log"
    command = words(tmp_path / "run", train__train_iters=4, parallel__tensor_model_parallel_size=2)
    launcher = launch(command, "--nproc", "1", "--max-restarts", "3", log=log)
    assert launcher.wait() == 2
    told = log.read_text()
    assert told.count("world size 1 is not divisible by tensor (2)") == 1 and "restarting" not in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("size", [1, 2, 4, 3])
def test_the_global_batch_is_kept_or_the_size_refused(size):
    config = RunConfig.load(None, words("run", train__train_iters=4)[1:])
    if size == 3:
        with pytest.raises(
            ConfigError, match=r"global_batch_size \(4\) is not a multiple of micro_batch_size"
        ):
            check_training(config, size)
    else:
        check_training(config, size)


def test_numbers_of_machines_that_the_layout_forbids_are_named_before_the_start(capsys):
    config = RunConfig.load(None, words("run", train__train_iters=4)[1:])
    check_job(config, [1, 2, 4], 1, one_machine=False)
    assert "machines" not in capsys.readouterr().out
    check_job(config, [1, 2, 3, 4], 1, one_machine=False)
    assert "the job cannot continue on 3 machines: train.global_batch_size (4)" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.full
def test_states_of_a_job_in_two_sizes_are_one_run(tmp_path):
    """Two ranks, then one, then two: the run of one rank alone, up to rounding."""
    output = tmp_path / "run"
    for end, size in ((3, 2), (6, 1), (9, 2)):
        command = words(output, train__train_iters=12, train__exit_interval=end)
        assert Ranks(command, size, tmp_path / "log").end() == [20] * size
    alone = words(tmp_path / "alone", train__train_iters=12, train__exit_interval=9)
    assert Ranks(alone, 1, tmp_path / "log").end() == [20]
    losses = [
        [record["loss"] for record in records(o / "metrics.jsonl")] for o in (output, tmp_path / "alone")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert stored(output, 9).keys() != {}
