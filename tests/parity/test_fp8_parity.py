"""FP8 in other layouts against one process: the first step's weight scales to the bit, runs of ten steps near."""

import functools

import pytest
import torch
from fp8_job import Fp8Outcome, fp8_config, run_fp8_job

from megalith.parity.differences import compare
from megalith.parity.layouts import LAYOUTS


@functools.cache
def alone(recipe: str) -> Fp8Outcome:
    return run_fp8_job(fp8_config(None, fp8_recipe=recipe))


CASES = [
    # Gradients of the first step: rounding before a cast may flip a code, and with a scale of the tensor itself all of
    # a tensor's codes hang on one rounding.
    ("delayed", "tp2-sp", 1e-5),
    ("delayed", "cp2", 1e-5),
    ("delayed", "pp2-zero_bubble", 1e-6),
    ("delayed", "tp2-sp-dp2-zero3", 1e-5),
    ("tensorwise", "tp2-sp", 1e-5),
    ("tensorwise", "pp2", 1e-6),
]


@pytest.mark.parametrize(("recipe", "layout", "gradients"), CASES)
def test_a_layout_trains_as_one_process(pool, recipe, layout, gradients):
    one = alone(recipe)
    found = pool.run(run_fp8_job, fp8_config(layout, fp8_recipe=recipe), size=LAYOUTS[layout].processes)
    errors = compare([rank.outcome for rank in found], one.outcome)
    assert errors.loss < 1e-6 and errors.gradient < gradients, errors
    assert errors.losses < 2e-4 and not errors.different, errors
    if one.first_scale is not None:
        for rank in found:
            assert torch.equal(rank.first_scale[:, 1], one.first_scale[:, 1])  # weights'
            torch.testing.assert_close(rank.first_scale, one.first_scale, rtol=1e-5, atol=0)
