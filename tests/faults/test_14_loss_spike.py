"""14: a loss 50 times those before it: back to the last checkpoint, on without its data, and logged."""

import json
from functools import partial
from pathlib import Path

import pytest
from ranks import Ranks, events, records, saved, words
from torch import Tensor

from megalith.cli.main import main
from megalith.training.run_state import Run

SPIKE = 8  # the step whose data has a bad sample


def worse(run: Run, loss: Tensor, is_bad: bool) -> Tensor:
    """Return the step's loss, 50 times as high if it is bad, as is the one that the run logs."""
    factor = 50 if is_bad else 1
    run.model.logged_loss = run.model.logged_loss * factor
    return loss * factor


def spoil(rank: int, seen: Path) -> None:
    """A loss 50 times as high whenever the data of step 8 comes; what comes is written to `seen`."""
    inner, bad = Run.gradients, set()

    def gradients(self, micro_batches):
        contents = [hash(batch.input_ids.numpy().tobytes()) for batch in micro_batches]
        with open(seen.with_name(f"{seen.name}.{rank}"), "a") as file:
            file.write(json.dumps({"step": self.step + 1, "contents": contents}) + "\n")
        if self.step + 1 == SPIKE and not bad:
            bad.update(contents)
        return worse(self, inner(self, micro_batches), bool(bad.intersection(contents)))

    Run.gradients = gradients


@pytest.mark.fault(14)
def test_the_run_goes_back_and_leaves_out_the_data_of_the_spike_and_of_the_step_before(tmp_path):
    output, seen = tmp_path / "run", tmp_path / "seen"
    watch = dict(runtime__loss_spike_threshold=3, runtime__loss_spike_window=4)
    length = dict(train__train_iters=40, train__exit_interval=12)  # within the data's first epoch
    command = words(output, checkpoint__save_interval=3, **length, **watch)
    running = Ranks(command, 2, tmp_path / "log", prepare=partial(spoil, seen=seen))
    assert running.end() == [20, 20], running.text()
    (event,) = events(output, "loss_spike")
    assert (event["step"], event["back_to"]) == (SPIKE, 6) and event["left_out"] == [[24, 32]]
    assert [record["step"] for record in records(output / "metrics.jsonl")] == list(range(1, 13))
    assert max(record["loss"] for record in records(output / "metrics.jsonl")) < 10
    manifest = json.loads((output / "checkpoints" / "step_00000012" / "manifest.json").read_text())
    assert manifest["left_out"] == [[24, 32]] and manifest["consumed_samples"] == 48
    for rank in range(2):
        given = records(seen.with_name(f"seen.{rank}"))
        assert [step["step"] for step in given] == [*range(1, 9), *range(7, 13)]
        contents = [content for step in given for content in step["contents"]]
        assert len(set(contents)) == len(contents)  # steps 7 and 8 of the second time have other samples


def test_without_a_checkpoint_from_before_it_the_run_goes_on_and_says_so(tmp_path):
    output = tmp_path / "run"
    watch = dict(runtime__loss_spike_threshold=3, runtime__loss_spike_window=4)
    command = words(output, train__train_iters=10, **watch)
    running = Ranks(command, 1, tmp_path / "log", prepare=partial(spoil, seen=tmp_path / "seen"))
    assert running.end() == [0], running.text()
    (event,) = events(output, "loss_spike")
    assert event["step"] == SPIKE and "no earlier checkpoint" in event["text"]


@pytest.mark.full
@pytest.mark.fault(14)
def test_a_run_that_went_back_by_hand_returns_to_no_step_of_the_branch_it_left(tmp_path, monkeypatch):
    output, inner, begun = tmp_path / "run", Run.gradients, []

    def train(**settings):
        length = dict(train__train_iters=20, train__deterministic=False)
        return main(words(output, **length, **settings))

    def gradients(self, micro_batches):
        begun.append(self.step)
        return worse(self, inner(self, micro_batches), self.step == 10 and begun.count(10) == 1)

    assert train(checkpoint__save_interval=3, train__exit_interval=9) == 20
    older = str(output / "checkpoints" / "step_00000003")
    assert train(checkpoint__load=older, train__exit_interval=5) == 20
    monkeypatch.setattr(Run, "gradients", gradients)
    watch = dict(runtime__loss_spike_threshold=3, runtime__loss_spike_window=4)
    assert (
        train(**watch, train__exit_interval=12) == 20
    )  # 6 and 9 are still there, of the branch that was left
    assert saved(output) == [f"step_{step:08d}" for step in (3, 5, 6, 9, 12)]
    (event,) = events(output, "loss_spike")
    assert (event["step"], event["back_to"]) == (11, 5)
    manifest = json.loads((output / "checkpoints" / "step_00000012" / "manifest.json").read_text())
    assert manifest["abandoned"] == [[2, 4]] and manifest["save_number"] == 5
