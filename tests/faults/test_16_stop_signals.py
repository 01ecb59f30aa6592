"""16: SIGTERM, SIGUSR1, SIGINT and SIGHUP give a checkpoint, before any evaluation, and an exit code of their own; a
second SIGTERM ends at once."""

import signal
import time
from functools import partial
from pathlib import Path

import pytest
from default_cases import by_default
from forked import Forked
from ranks import Ranks, events, saved, steps, stored, until, words

import megalith.checkpoint.saver as saver
from megalith.launch.signals import REPEAT_WINDOW

STOPS = [(signal.SIGTERM, 22), (signal.SIGUSR1, 23), (signal.SIGINT, 24), (signal.SIGHUP, 25)]
GRACE = 30.0  # seconds that a scheduler leaves
LONG = dict(train__eval_iters=100_000, train__eval_interval=70_000)  # an evaluation would take an hour


@pytest.mark.parametrize(("number", "code"), by_default(STOPS, STOPS[0]), ids=str)
@pytest.mark.fault(16)
def test_a_signal_to_one_rank_saves_on_all_after_the_same_step_and_the_run_goes_on_bitwise(
    tmp_path, number, code
):
    output = tmp_path / "run"
    running = Ranks(words(output, train__train_iters=100_000, **LONG), 2, tmp_path / "log")
    until(lambda: len(steps(output)) >= 3, "step 3")
    running.send(number, [1])
    sent = time.time()
    assert running.end() == [code, code], running.text()
    (last,) = saved(output)
    assert (output / "checkpoints" / "latest").stat().st_mtime - sent < GRACE
    assert last == f"step_{steps(output)[-1]:08d}" and steps(output)[-1] < 70_000
    assert events(output, "stop")[0]["reason"] == number.name
    if number is signal.SIGTERM:
        end = steps(output)[-1] + 4
        for folder in (output, tmp_path / "straight"):
            command = words(folder, train__train_iters=100_000, train__exit_interval=end)
            rest = Ranks(command, 2, tmp_path / "log")
            assert rest.end() == [20, 20], rest.text()
        assert stored(output, end) == stored(tmp_path / "straight", end)


def test_a_signal_in_an_evaluation_breaks_it_off_and_saves(tmp_path):
    output = tmp_path / "run"
    command = words(output, train__train_iters=100_000, **{**LONG, "train__eval_interval": 2})
    running = Ranks(command, 2, tmp_path / "log")
    until(lambda: "evaluating after iteration 2" in running.text(0), "the evaluation")
    running.send(signal.SIGTERM, [1])
    assert running.end() == [22, 22], running.text()
    assert saved(output) == ["step_00000002"] and (output / "evaluations.jsonl").read_text() == ""


def slow_save(rank: int, begun: Path) -> None:
    write = saver.write_step

    def slowly(*arguments):
        begun.touch()
        time.sleep(1000)
        write(*arguments)

    saver.write_step = slowly


@pytest.mark.fault(16)
def test_a_second_sigterm_in_the_midst_of_a_save_ends_at_once_and_the_old_checkpoint_is_whole(tmp_path):
    output, begun = tmp_path / "run", tmp_path / "begun"
    command = words(output, train__train_iters=100_000)
    first = Ranks([*command, "--train.exit_interval", "4"], 1, tmp_path / "log")
    assert first.end() == [20], first.text()
    before = stored(output, 4)
    running = Ranks(command, 1, tmp_path / "log", prepare=partial(slow_save, begun=begun))
    until(lambda: len(steps(output)) > 6, "step 7")
    running.send(signal.SIGTERM)
    until(begun.exists, "the save")
    time.sleep(1.1 * REPEAT_WINDOW)
    running.send(signal.SIGTERM)
    assert running.end() == [128 + signal.SIGTERM]
    assert "a second SIGTERM: exiting at once" in running.text()
    assert saved(output) == ["step_00000004"] and stored(output, 4) == before
    again = Ranks([*command, "--train.exit_interval", "5"], 1, tmp_path / "log")
    assert again.end() == [20] and "resuming from" in again.text()


@pytest.mark.full
def test_a_sigterm_to_torchrun_reaches_the_ranks_and_they_save(tmp_path):
    output, log = tmp_path / "run", tmp_path / "log"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "megalith", *words(output, train__train_iters=100_000)]
    running = Forked(command, log)
    try:
        until(lambda: len(steps(output)) >= 3, "step 3")
        running.send_signal(signal.SIGTERM)
        running.wait()
    finally:
        running.kill()
        running.wait()
    assert "by SIGTERM; resume with checkpoint.load" in log.read_text()
    assert saved(output) == [f"step_{steps(output)[-1]:08d}"]
