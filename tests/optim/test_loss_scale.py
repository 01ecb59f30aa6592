"""The device-side loss scale against a transcription of Megatron's counters in plain Python."""

import random

import pytest
import torch

from megalith.config import OptimConfig
from megalith.errors import ConfigError
from megalith.optim import build_loss_scale, build_optimizer, optimizer_step


class PlainScale:
    def __init__(self, initial, minimum, window, hysteresis):
        self.scale, self.minimum, self.window, self.hysteresis = initial, minimum, window, hysteresis
        self.growth_tracker, self.hysteresis_tracker = 0, hysteresis

    def update(self, overflow):
        if overflow:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = max(self.scale * 0.5, self.minimum)
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.window:
            self.growth_tracker = 0
            self.hysteresis_tracker = self.hysteresis
            self.scale = self.scale * 2.0


@pytest.mark.parametrize(
    ("window", "hysteresis", "overflows"), [(5, 2, 0.1), (3, 1, 0.4), (4, 3, 0.7), (1, 2, 0.5)]
)
def test_transitions_are_megatrons(window, hysteresis, overflows):
    config = OptimConfig(
        lr=1.0, initial_loss_scale=64.0, min_loss_scale=2.0, loss_scale_window=window, hysteresis=hysteresis
    )
    scale = build_loss_scale("fp16", config, "cpu")
    plain = PlainScale(64.0, 2.0, window, hysteresis)
    rng = random.Random(window)
    for _ in range(300):
        overflow = rng.random() < overflows
        scale.update(torch.tensor(float(overflow)))
        plain.update(overflow)
        if plain.scale > 2.0**127:
            break
        assert scale.state() == {
            "scale": plain.scale,
            "growth_tracker": plain.growth_tracker,
            "hysteresis_tracker": plain.hysteresis_tracker,
        }


def test_defaults_forgive_one_overflow_then_halve_at_each():
    scale = build_loss_scale("fp16", OptimConfig(lr=1.0), "cpu")
    seen = []
    for _ in range(4):
        scale.update(torch.tensor(1.0))
        seen.append(scale.scale.item())
    assert seen == [2.0**16, 2.0**15, 2.0**14, 2.0**13]


def test_the_scale_stays_finite():
    config = OptimConfig(lr=1.0, loss_scale_window=1, initial_loss_scale=2.0**126)
    scale = build_loss_scale("fp16", config, "cpu")
    for _ in range(5):
        scale.update(torch.tensor(0.0))
    assert scale.scale.item() == 2.0**127


def test_state_is_plain_numbers_and_goes_on_where_it_was():
    config = OptimConfig(lr=1.0, loss_scale_window=3)
    one = build_loss_scale("fp16", config, "cpu")
    for overflow in (1.0, 1.0, 0.0, 0.0):
        one.update(torch.tensor(overflow))
    other = build_loss_scale("fp16", config, "cpu")
    other.load_state(one.state())
    assert all(type(value) in (int, float) for value in one.state().values())
    for scale in (one, other):
        scale.update(torch.tensor(0.0))
    assert one.state() == other.state() == {"scale": 2.0**16, "growth_tracker": 0, "hysteresis_tracker": 2}


def test_scale_is_one_outside_fp16_and_constant_when_given():
    for precision, config, want in [
        ("fp32", OptimConfig(lr=1.0), 1.0),
        ("bf16", OptimConfig(lr=1.0), 1.0),
        ("fp16", OptimConfig(lr=1.0, loss_scale=128.0), 128.0),
    ]:
        scale = build_loss_scale(precision, config, "cpu")
        scale.update(torch.tensor(1.0))
        scale.load_state({"scale": 5.0, "growth_tracker": 1, "hysteresis_tracker": 1})
        assert (scale.scale.item(), scale.state()) == (want, {})


def test_a_dynamic_scale_starts_afresh_from_a_run_that_had_none():
    scale = build_loss_scale("fp16", OptimConfig(lr=1.0), "cpu")
    scale.load_state(build_loss_scale("bf16", OptimConfig(lr=1.0), "cpu").state())
    assert scale.scale.item() == 2.0**16


def test_a_floor_above_the_start_is_refused():
    with pytest.raises(ConfigError, match=r"min_loss_scale \(8\.0\).*initial_loss_scale \(4\.0\)"):
        build_loss_scale("fp16", OptimConfig(lr=1.0, min_loss_scale=8.0, initial_loss_scale=4.0), "cpu")
    level = OptimConfig(lr=1.0, min_loss_scale=4.0, initial_loss_scale=4.0)
    assert build_loss_scale("fp16", level, "cpu").scale == 4


def test_an_overflowing_step_reports_the_scale_it_used_and_halves_the_next():
    config = OptimConfig(lr=1.0, hysteresis=1)
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = build_optimizer([("w", parameter)], config)
    scale = build_loss_scale("fp16", config, "cpu")
    parameter.grad = torch.tensor([1.0, float("inf"), 1.0])
    result = optimizer_step(optimizer, scale, clip_grad=1.0)
    assert (result.loss_scale.item(), scale.scale.item(), result.skipped.item()) == (2.0**16, 2.0**15, 1.0)
