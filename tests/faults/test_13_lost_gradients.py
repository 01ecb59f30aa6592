"""13: NaN or Inf on one rank: all skip together, rank and parameter are named, the run ends after so many in a row.

And a step that is repeated: what does not come again was the hardware's, and the run goes on as if nothing had been.
"""

import math
from functools import partial

import pytest
import torch
from default_cases import by_default
from ranks import Ranks, events, records, stored, words

from megalith.config import ModelConfig
from megalith.config.presets import PRESETS
from megalith.models.init import initialize
from megalith.models.transformer import Transformer
from megalith.parallel.data.nonfinite_gradients import NonfiniteGradients, watch_nonfinite_gradients
from megalith.training.run_state import Run

SKIPPED_STEP = 4


def poison(rank: int, samples: range, times: int, value: float = math.nan) -> None:
    """On rank 1 the gradient behind layer 1 becomes `value`, `times` times, when a step has one of these samples."""
    inner, left = Run.gradients, [times]

    def gradients(self, micro_batches):
        numbers = {int(number) for batch in micro_batches for number in batch.sample_numbers}
        if rank != 1 or numbers.isdisjoint(samples) or not left[0]:
            return inner(self, micro_batches)
        left[0] -= 1
        hook = (
            self.model.chunks[0]
            .layers["1"]
            .register_forward_hook(
                lambda module, given, out: out.register_hook(lambda grad: grad + value) and None
            )
        )
        try:
            return inner(self, micro_batches)
        finally:
            hook.remove()

    Run.gradients = gradients


def step_samples(step: int) -> range:
    return range(4 * (step - 1), 4 * step)


LAYOUTS = {
    "data": {},
    "data, sharded": {"parallel__data_parallel_sharding_strategy": "optim_grads_params"},
    "tensor": {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True},
    "pipeline": {"parallel__pipeline_model_parallel_size": 2},
}


@pytest.mark.parametrize("layout", by_default(LAYOUTS, "data, sharded"))
@pytest.mark.fault(13)
def test_all_ranks_skip_the_step_and_the_log_names_the_rank_and_the_parameter(tmp_path, layout):
    output = tmp_path / "run"
    command = words(output, train__train_iters=6, **LAYOUTS[layout])
    value = math.inf if layout == "tensor" else math.nan
    lasting = partial(poison, samples=step_samples(SKIPPED_STEP), times=99, value=value)
    running = Ranks(command, 2, tmp_path / "log", prepare=lasting)
    assert running.end() == [0, 0], running.text()
    metrics = records(output / "metrics.jsonl")
    assert [record["skipped"] for record in metrics] == [0, 0, 0, 1, 0, 0]
    assert [record["nan_iterations"] for record in metrics] == [0] * 6
    (event,) = events(output, "lost_step")
    assert (event["step"], event["ranks"]) == (SKIPPED_STEP, [1])
    named = event["parameters"]["1"]
    assert named and all(name.startswith("layers.1.") for name in named)
    assert "on rank 1 in the gradient of layers.1." in running.text(0) and "on rank 0" not in running.text(0)


def test_every_parameter_is_watched():
    model = Transformer(ModelConfig(**PRESETS["tiny-gpt"], vocab_size=64, max_position_embeddings=8))
    initialize(model, model.config, seed=1)
    ids = torch.arange(8)[None]
    with watch_nonfinite_gradients([model]) as watched:
        (model(ids, labels=ids) * math.nan).backward()
        assert set(watched.names()) == {name for name, _ in model.named_parameters()}


def test_a_gradient_that_was_not_finite_in_an_earlier_micro_batch_stays_so():
    gradients = NonfiniteGradients()
    for values in ([1.0, math.nan], [1.0, 2.0]):
        gradients.record("weight", torch.tensor(values))
    gradients.record("bias", torch.ones(2))
    assert gradients.names() == ["weight"]


@pytest.mark.fault(13)
def test_the_run_ends_after_so_many_lost_steps_in_a_row(tmp_path):
    output = tmp_path / "run"
    command = words(output, train__train_iters=20, runtime__max_bad_steps=3)
    running = Ranks(command, 2, tmp_path / "log", prepare=partial(poison, samples=range(8, 99), times=99))
    assert running.end() == [5, 5], running.text()
    assert [record["skipped"] for record in records(output / "metrics.jsonl")] == [0, 0, 1, 1, 1]
    assert "3 consecutive steps up to step 5" in running.text(0)
    assert len(events(output, "lost_step")) == 1


@pytest.mark.parametrize(("times", "kind"), by_default([(1, "transient"), (99, "lasting")], (1, "transient")))
def test_a_step_repeated_tells_a_passing_fault_from_a_lasting_one(tmp_path, times, kind):
    output, clean = tmp_path / "run", tmp_path / "clean"
    again = dict(train__train_iters=6, runtime__rerun_bad_steps=True)
    faulty = partial(poison, samples=step_samples(SKIPPED_STEP), times=times)
    running = Ranks(words(output, **again), 2, tmp_path / "log", prepare=faulty)
    assert running.end() == [0, 0], running.text()
    (event,) = events(output, f"{kind}_fault")
    assert event["step"] == SKIPPED_STEP
    skipped = [record["skipped"] for record in records(output / "metrics.jsonl")]
    if kind == "lasting":
        assert skipped == [0, 0, 0, 1, 0, 0] and len(events(output, "lost_step")) == 1
        return
    assert skipped == [0] * 6 and not events(output, "lost_step")
    assert Ranks(words(clean, **again), 2, tmp_path / "log").end() == [0, 0]
    assert stored(output, 6) == stored(clean, 6)
