"""5: a save and an evaluation that take longer than the time-out end no run."""

import time

import pytest
from ranks import Ranks, records, saved, words

import megalith.checkpoint.saver as saver
from megalith.parallel.parallel_model import ParallelModel

TIMEOUT = 3.0  # seconds
BATCHES = 3  # of an evaluation


def slow_disk_and_evaluation(rank: int) -> None:
    """One rank's share of a save takes longer than the time-out; so does an evaluation, though no batch of it does."""
    write, evaluate = saver.write_step, ParallelModel.evaluate

    def slowly(*arguments):
        if rank == 1:
            time.sleep(1.25 * TIMEOUT)
        write(*arguments)

    def evaluate_slowly(self, micro_batches, loss):
        if rank == 1:
            time.sleep(1.25 * TIMEOUT / BATCHES)
        return evaluate(self, micro_batches, loss)

    saver.write_step, ParallelModel.evaluate = slowly, evaluate_slowly


@pytest.mark.fault(5)
def test_a_save_and_an_evaluation_longer_than_the_time_out_end_no_run(tmp_path):
    output = tmp_path / "run"
    command = words(
        output,
        train__train_iters=3,
        train__eval_iters=BATCHES,
        train__eval_interval=3,
        data__split="80,20",
        runtime__distributed_timeout_minutes=TIMEOUT / 60,
    )
    running = Ranks(command, 2, tmp_path / "log", prepare=slow_disk_and_evaluation)
    assert running.end() == [0, 0], running.text()
    assert saved(output) == ["step_00000003"] and len(records(output / "evaluations.jsonl")) == 1
