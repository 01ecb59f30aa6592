"""18: a rank that computes for twice as long as the other is named within so many steps."""

import time

import pytest
from ranks import Ranks, events, words

from megalith.report.stragglers import slow_ranks
from megalith.training.run_state import Run

INTERVAL = 4


def slow(rank: int) -> None:
    inner = Run.gradients

    def gradients(self, micro_batches):
        if rank == 1 and (self.step + 1) % INTERVAL == 0:  # in the steps that are measured
            time.sleep(1.0)  # long against what a step takes on a machine with much else to do
        return inner(self, micro_batches)

    Run.gradients = gradients


@pytest.mark.fault(18)
def test_a_slow_rank_is_named_at_each_measurement(tmp_path):
    output = tmp_path / "run"
    watch = dict(runtime__enable_straggler_detection=True, runtime__straggler_interval=INTERVAL)
    command = words(output, train__train_iters=9, runtime__straggler_threshold=2, **watch)
    running = Ranks(command, 2, tmp_path / "log", prepare=slow)
    assert running.end() == [0, 0], running.text()
    found = events(output, "straggler")
    assert [(event["step"], event["rank"]) for event in found] == [(4, 1), (8, 1)]
    assert all(event["ratio"] > 2 for event in found) and "rank 1 is slow" in running.text(0)


def test_only_ranks_above_the_threshold_are_slow():
    assert slow_ranks({0: 10.0, 1: 11.0, 2: 10.5, 3: 21.0}, 1.25) == {3: 2.0}
    assert slow_ranks({0: 10.0, 4: 20.0}, 1.25) == {4: 2.0}
