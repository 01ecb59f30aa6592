"""The comparison itself: what counts as equal, and that the cases have what they are meant to have."""

import math
from unittest import mock

import pytest
import torch
from parity_cases import DOCUMENTS, RUNS, run_config

from megalith.config import RunConfig
from megalith.parity.differences import Errors, compare, gradient_errors, relative_error
from megalith.parity.job import Outcome, run_job, start


def test_a_gradient_is_measured_against_its_own_norm_and_a_floor():
    expected = {"weight": torch.tensor([3.0, 4.0]), "key bias": torch.tensor([1e-9])}
    found = {"weight": torch.tensor([3.0, 4.0 + 5e-5]), "key bias": torch.tensor([-1e-9])}
    errors = gradient_errors(found, expected)
    assert errors["weight"] == pytest.approx(1e-5, rel=0.1)
    assert errors["key bias"] == pytest.approx(2e-9 / 5e-6, rel=0.1)


def test_a_missing_gradient_and_one_that_is_not_a_number_are_infinitely_wrong():
    expected = {"a": torch.ones(2), "b": torch.ones(2)}
    assert gradient_errors({"a": torch.tensor([1.0, math.nan])}, expected) == {"a": math.inf, "b": math.inf}
    assert relative_error([math.nan], [1.0]) == relative_error([1.0], [math.inf]) == math.inf
    assert relative_error([math.nan, 2.0], [math.nan, 2.0]) == 0.0
    assert relative_error([0.0, 2.0], [0.0, 2.0]) == 0.0 and relative_error([1e-9], [0.0]) == math.inf
    assert not Errors(norm=math.inf).within() and not Errors(different=["skipped steps"]).within()


def test_gradients_that_are_all_zero_are_equal_to_zero_alone():
    zero = {"a": torch.zeros(2), "b": torch.zeros(3)}
    assert gradient_errors(zero, zero) == {"a": 0.0, "b": 0.0}
    assert gradient_errors(zero | {"a": torch.tensor([0.0, 1e-9])}, zero) == {"a": math.inf, "b": 0.0}


def test_ranks_that_all_met_nan_agree():
    def outcome(norm):
        gradients = {"a": torch.ones(2)}
        return Outcome(gradients, [1.0], [norm], [True], [1.0], 1.0, [[1]], gradients, [])

    ranks = [outcome(float("nan")), outcome(float("nan"))]
    assert compare(ranks, outcome(float("nan"))).within()
    assert compare([*ranks, outcome(2.0)], ranks[0]).different == ["results of ranks"]


@pytest.mark.parametrize("run", [run for run, tree in RUNS.items() if tree.get("data") == DOCUMENTS])
def test_no_two_ranks_have_as_many_masked_tokens(run):
    trainer = start(run_config(run, None, ""))
    with trainer.data.train_loader(0, 0, trainer.device) as batches:
        masked = 1 - torch.cat([next(batches).loss_mask for _ in range(4)])  # [8, seq]
    for ranks in (2, 4):
        of_data_ranks = masked.view(-1, ranks, 2, masked.shape[1]).sum((0, 2, 3))  # micro-batches of 2
        chunks = masked.unflatten(1, (2 * ranks, -1)).sum((0, 2))
        of_context_ranks = chunks[:ranks] + chunks.flip(0)[:ranks]
        assert len(of_data_ranks.unique()) == len(of_context_ranks.unique()) == ranks


def run_job_with_a_mistake(config: RunConfig) -> Outcome:
    """Leaves out the sum over the tensor axis that sequence parallelism owes the gradients of norms and biases."""
    with mock.patch("megalith.parallel.parallel_model.reduce_partial_gradients"):
        return run_job(config)


def test_a_forgotten_reduction_is_found_in_the_gradient_and_in_the_copies(pool):
    small = {"model": {"num_layers": 1}, "train": {"train_iters": 2}}
    ranks = pool.run(run_job_with_a_mistake, run_config("gpt2", "tp2-sp", "", **small), size=2)
    errors = compare(ranks, run_job(run_config("gpt2", None, "", **small)))
    assert errors.loss < 1e-6 and errors.gradient > 0.1
    assert "replicas of" in errors.different[-1] and "final_layernorm.weight" in errors.different[-1]
