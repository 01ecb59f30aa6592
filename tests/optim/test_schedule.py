"""The schedule against a straight transcription of the published formulas, position by position."""

import math

import pytest

from megalith.config import OptimConfig, TrainConfig
from megalith.errors import ConfigError
from megalith.optim.schedule import build_schedule

BATCH = 6


def expected_lr(n, style, peak, low, init, warmup, decay, wsd=0, wsd_style="exponential"):
    """n, warmup, decay and wsd in samples."""
    if warmup and n <= warmup:
        return init + (peak - init) * n / warmup
    if style == "constant":
        return peak
    if n > decay:
        return low
    if style == "inverse-square-root":
        return max(low, peak * max(warmup, 1) ** 0.5 / max(n, 1) ** 0.5)
    progress = (n - warmup) / (decay - warmup)
    if style == "WSD":
        progress = (n - (decay - wsd)) / wsd
        if progress <= 0:
            return peak
        style = wsd_style
    if style == "linear":
        share = 1 - progress
    elif style == "cosine":
        share = (1 + math.cos(math.pi * progress)) / 2
    elif style == "exponential":
        share = 2 * math.pow(0.5, progress) - 1
    elif style == "minus_sqrt":
        share = 1 - math.sqrt(progress)
    return low + (peak - low) * share


STYLES = [
    ("constant", None),
    ("linear", None),
    ("cosine", None),
    ("inverse-square-root", None),
    ("WSD", "exponential"),
    ("WSD", "linear"),
    ("WSD", "cosine"),
    ("WSD", "minus_sqrt"),
]


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize(("style", "wsd_style"), STYLES)
def test_learning_rate_by_iterations(style, wsd_style, warmup):
    wsd = {"lr_wsd_decay_style": wsd_style, "lr_wsd_decay_iters": 12} if wsd_style else {}
    optim = OptimConfig(
        lr=3e-3,
        min_lr=1e-4,
        lr_decay_style=style,
        lr_decay_iters=40,
        lr_warmup_iters=warmup,
        lr_warmup_init=1e-5,
        **wsd,
    )
    schedule = build_schedule(optim, TrainConfig(train_iters=60, global_batch_size=BATCH))
    for iteration in range(60):
        want = expected_lr(
            iteration * BATCH, style, 3e-3, 1e-4, 1e-5, warmup * BATCH, 40 * BATCH, 12 * BATCH, wsd_style
        )
        assert schedule.learning_rate(iteration, -1) == pytest.approx(want, rel=1e-14)


@pytest.mark.parametrize(("style", "wsd_style"), STYLES)
def test_learning_rate_by_samples(style, wsd_style):
    wsd = {"lr_wsd_decay_style": wsd_style, "lr_wsd_decay_samples": 70} if wsd_style else {}
    optim = OptimConfig(lr=1e-3, lr_decay_style=style, lr_warmup_samples=30, **wsd)
    schedule = build_schedule(optim, TrainConfig(train_samples=300, global_batch_size=BATCH))
    for consumed in range(0, 400, 5):
        want = expected_lr(consumed, style, 1e-3, 0.0, 0.0, 30, 300, 70, wsd_style)
        assert schedule.learning_rate(-1, consumed) == pytest.approx(want, rel=1e-14, abs=1e-18)


@pytest.mark.parametrize(("style", "wsd_style"), STYLES)
def test_a_run_of_iterations_can_move_by_samples_as_megatrons_does(style, wsd_style):
    wsd = {"lr_wsd_decay_style": wsd_style, "lr_wsd_decay_iters": 12} if wsd_style else {}
    growing = dict(start_weight_decay=0.1, end_weight_decay=0.3, weight_decay_incr_style="linear")
    optim = OptimConfig(
        lr=1e-3,
        lr_decay_style=style,
        lr_warmup_iters=5,
        lr_decay_iters=40,
        schedule_unit="samples",
        **wsd,
        **growing,
    )
    schedule = build_schedule(optim, TrainConfig(train_iters=50, global_batch_size=BATCH))
    for consumed in range(0, 50 * BATCH, 7):
        want = expected_lr(consumed, style, 1e-3, 0.0, 0.0, 5 * BATCH, 40 * BATCH, 12 * BATCH, wsd_style)
        assert schedule.learning_rate(-1, consumed) == pytest.approx(want, rel=1e-14, abs=1e-18)
        assert schedule.weight_decay(-1, consumed) == pytest.approx(0.1 + 0.2 * consumed / (50 * BATCH))


def test_warmup_as_a_fraction_is_of_the_decay_and_may_end_between_steps():
    optim = OptimConfig(lr=1e-3, lr_decay_iters=25, lr_warmup_fraction=0.1, lr_decay_style="linear")
    schedule = build_schedule(optim, TrainConfig(train_iters=50, global_batch_size=BATCH))
    for iteration in range(50):
        want = expected_lr(iteration * BATCH, "linear", 1e-3, 0.0, 0.0, 2.5 * BATCH, 25 * BATCH)
        assert schedule.learning_rate(iteration, 0) == pytest.approx(want, rel=1e-14)


def test_first_update_of_a_warmup_has_the_initial_rate_and_the_decay_defaults_to_the_run():
    optim = OptimConfig(lr=1e-3, lr_warmup_iters=10)
    schedule = build_schedule(optim, TrainConfig(train_iters=100, global_batch_size=BATCH))
    assert schedule.learning_rate(0, 0) == 0.0
    assert schedule.learning_rate(10, 0) == 1e-3
    assert schedule.learning_rate(100, 0) == pytest.approx(0.0, abs=1e-18)


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_weight_decay_grows_over_the_run(style):
    optim = OptimConfig(
        lr=1.0, start_weight_decay=0.02, end_weight_decay=0.1, weight_decay_incr_style=style, lr_decay_iters=5
    )
    schedule = build_schedule(optim, TrainConfig(train_iters=20, global_batch_size=BATCH))
    for iteration in range(25):
        progress = min(iteration / 20, 1.0)
        if style == "cosine":
            progress = (1 + math.cos(math.pi * (1 - progress))) / 2
        assert schedule.weight_decay(iteration, 0) == pytest.approx(0.02 + 0.08 * progress, rel=1e-14)


def test_weight_decay_is_constant_by_default():
    schedule = build_schedule(OptimConfig(lr=1.0), TrainConfig(train_iters=5, global_batch_size=1))
    assert {schedule.weight_decay(iteration, 0) for iteration in range(9)} == {0.01}


ITERS = {"train_iters": 100, "global_batch_size": 4}
SAMPLES = {"train_samples": 400, "global_batch_size": 4}


@pytest.mark.parametrize(
    ("optim", "train", "words"),
    [
        ({"lr": None}, ITERS, ["optim.lr is not set"]),
        ({}, {"global_batch_size": 4}, ["train_iters", "train_samples"]),
        ({}, {"train_iters": 4}, ["train.global_batch_size is not set"]),
        ({}, {**ITERS, "train_samples": 400}, ["train_iters is 100", "train_samples is 400", "exactly one"]),
        ({"lr_warmup_iters": 100}, ITERS, ["100 iters", "lr_decay_iters"]),
        ({"lr_warmup_iters": 50, "lr_decay_iters": 40}, ITERS, ["50 iters", "40 iters"]),
        ({"lr_warmup_fraction": 1.0}, ITERS, ["100 iters"]),
        ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 5}, ITERS, ["(0.1)", "(5)", "keep one"]),
        ({"lr_warmup_fraction": 0.1, "lr_warmup_samples": 5}, SAMPLES, ["(0.1)", "(5)", "keep one"]),
        ({"lr_decay_samples": 300}, ITERS, ["lr_decay_samples is 300", "set optim.lr_decay_iters"]),
        ({"lr_warmup_iters": 3}, SAMPLES, ["lr_warmup_iters is 3", "set optim.lr_warmup_samples"]),
        ({"lr_decay_style": "WSD"}, ITERS, ["lr_wsd_decay_iters is not set"]),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 95, "lr_warmup_iters": 10},
            ITERS,
            ["is 95", "between 1 and 90"],
        ),
        ({"min_lr": 2.0}, ITERS, ["min_lr (2.0)", "lr (1.0)"]),
        ({"lr_warmup_init": 2.0}, ITERS, ["lr_warmup_init (2.0)", "lr (1.0)"]),
        ({"start_weight_decay": 0.1}, ITERS, ["incr_style linear or cosine, which is constant"]),
        ({"weight_decay_incr_style": "linear"}, ITERS, ["set both"]),
        (
            {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.2, "end_weight_decay": 0.1},
            ITERS,
            ["(0.2)", "(0.1)"],
        ),
    ],
)
def test_impossible_schedules_are_refused(optim, train, words):
    with pytest.raises(ConfigError) as error:
        build_schedule(OptimConfig(**{"lr": 1.0, **optim}), TrainConfig(**train))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_constant_rate_needs_no_decay_to_fit_the_warmup():
    optim = OptimConfig(lr=1.0, lr_decay_style="constant", lr_warmup_iters=10)
    schedule = build_schedule(optim, TrainConfig(train_iters=5, global_batch_size=1))
    assert schedule.learning_rate(5, 5) == 0.5


def test_decoupled_rates_follow_the_same_schedule_between_their_own_ends():
    optim = OptimConfig(
        lr=1e-3, min_lr=1e-4, decoupled_lr=4e-3, decoupled_min_lr=2e-3, lr_decay_style="linear"
    )
    schedule = build_schedule(optim, TrainConfig(train_iters=10, global_batch_size=2))
    rates = [schedule.decoupled.learning_rate(iteration, 0) for iteration in (0, 5, 10)]
    assert rates == pytest.approx([4e-3, 3e-3, 2e-3])
    assert schedule.learning_rate(10, 0) == pytest.approx(1e-4)
    without = optim.model_copy(update={"decoupled_min_lr": None})
    schedule = build_schedule(without, TrainConfig(train_iters=10, global_batch_size=2))
    assert schedule.decoupled.learning_rate(10, 0) == pytest.approx(1e-4)
    with pytest.raises(ConfigError, match=r"optim\.decoupled_lr .1e-05. is below"):
        build_schedule(
            optim.model_copy(update={"decoupled_lr": 1e-5}), TrainConfig(train_iters=9, global_batch_size=2)
        )


@pytest.mark.parametrize("counted", ["iters", "samples"])
def test_the_rate_rises_again_from_the_step_at_which_a_run_continues(counted):
    scale = 1 if counted == "iters" else BATCH
    length = {f"train_{counted}": 100 * scale}
    settings = dict(
        lr=3e-3,
        min_lr=1e-4,
        lr_warmup_init=1e-5,
        lr_decay_style="linear",
        **{f"lr_warmup_{counted}": 5 * scale},
    )
    again = dict(lr_rewarm_start=40 * scale, lr_rewarm_length=10 * scale)
    train = TrainConfig(global_batch_size=BATCH, **length)
    plain, rewarmed = (build_schedule(OptimConfig(**settings, **more), train) for more in ({}, again))
    for step in range(100):
        before, rate = (each.learning_rate(step, step * BATCH) for each in (plain, rewarmed))
        ratio = min(max(step - 40, 0) / 10, 1) if step >= 40 else 1
        assert rate == pytest.approx(1e-5 + (before - 1e-5) * ratio, rel=1e-12), step
    assert rewarmed.learning_rate(40, 40 * BATCH) == 1e-5
