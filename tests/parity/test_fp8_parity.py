"""FP8 in other layouts against one process: the first step's weight scales to the bit, runs of ten steps near."""

import functools

import pytest
import torch
from fp8_job import Fp8Outcome, fp8_config, run_fp8_job
from test_resume_in_another_layout import train

from megalith.config import RunConfig
from megalith.errors import ConfigError
from megalith.parity.differences import compare
from megalith.parity.job import start, state_by_name
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
    # a greedy token may fall otherwise where two are within a flipped code of each other
    assert errors.losses < 2e-4 and set(errors.different) <= {"generated tokens"}, errors
    if one.first_scale is not None:
        for rank in found:
            assert torch.equal(rank.first_scale[:, 1], one.first_scale[:, 1])  # weights'
            torch.testing.assert_close(rank.first_scale, one.first_scale, rtol=1e-5, atol=0)


@pytest.mark.parametrize("length", [1, 3])
def test_a_resumed_run_is_bitwise_the_one_that_went_on(tmp_path, length):
    settings = {"output_dir": str(tmp_path), "train_iters": 4, "fp8_amax_history_len": length}
    settings |= {"fp8_amax_compute_algo": "max"}
    straight = start(fp8_config(None, **settings))
    train(straight, 2)
    straight.save()
    resumed = start(fp8_config(None, **settings).with_settings({"checkpoint.load": str(tmp_path)}))
    assert torch.equal(resumed.model.amaxes.history, straight.model.amaxes.history)
    assert train(straight, 2) == train(resumed, 2)
    states = state_by_name(straight), state_by_name(resumed)
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_an_infinity_that_the_clamp_hides_skips_the_step_and_leaves_the_scales():
    run = start(fp8_config(None, train_iters=4))
    train(run, 1)
    before = run.model.amaxes.scale.clone()
    weight = dict(run.model.parameters.named)["layers.1.mlp.linear_fc2.weight"]
    with torch.no_grad():
        kept, weight[0, 0] = weight[0, 0].item(), float("inf")
    with run.data.train_loader(run.step, run.consumed_samples, run.device) as batches:
        assert run.train_step(batches).skipped
    assert torch.equal(run.model.amaxes.scale, before)
    with torch.no_grad():
        weight[0, 0] = kept
    train(run, 1)
    assert not torch.equal(run.model.amaxes.scale, before)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train.fp8_recipe": "mxfp8"}, "capability 10"),
        ({"train.fp8_recipe": "blockwise"}, "set it to e4m3"),
        ({"train.fp8_recipe": "blockwise", "train.fp8_format": "e4m3"}, "multiples of 128"),
        ({"model.ffn_hidden_size": 40}, "ffn_hidden_size 40"),
        ({"train.first_last_layers_bf16": True, "train.num_layers_at_end_in_bf16": 3}, "leave none of the 4"),
        ({"train.fp8_param_gather": True}, "does not have"),
    ],
)
def test_what_cannot_be_is_refused_with_its_sizes(settings, words):
    config: RunConfig = fp8_config(None).with_settings(settings)
    with pytest.raises(ConfigError, match=words):
        start(config)
