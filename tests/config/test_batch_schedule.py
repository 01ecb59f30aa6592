"""Batch-size ramp-up against a step-by-step transcription of Megatron's rule."""

import pytest

from megalith.config import TrainConfig
from megalith.config.train import BatchSizeSchedule
from megalith.errors import ConfigError

RAMPS = [(8, 8, 100, 32), (4, 4, 1000, 64), (2, 1, 7, 9), (16, 16, 0, 64), (3, 5, 1, 33), (8, 8, 500, 8)]


def megatron_size(consumed, start, increment, ramp_samples, global_batch_size):
    if consumed > ramp_samples or start == global_batch_size:
        return global_batch_size
    increments = (global_batch_size - start) // increment
    if ramp_samples == 0:
        return global_batch_size
    return start + int(consumed / (ramp_samples / increments)) * increment


@pytest.mark.parametrize(("start", "increment", "ramp_samples", "full"), RAMPS)
def test_ramp_is_megatrons_at_every_sample_count(start, increment, ramp_samples, full):
    schedule = BatchSizeSchedule(full, rampup_batch_size=(start, increment, ramp_samples))
    for consumed in range(2 * ramp_samples + 10):
        assert schedule.size(consumed) == megatron_size(consumed, start, increment, ramp_samples, full)


@pytest.mark.parametrize(("start", "increment", "ramp_samples", "full"), RAMPS)
def test_iterations_and_samples_agree_with_walking_the_steps(start, increment, ramp_samples, full):
    schedule = BatchSizeSchedule(full, rampup_batch_size=(start, increment, ramp_samples))
    consumed = 0
    for iteration in range(120):
        assert schedule.samples_for_iterations(iteration) == consumed
        assert schedule.iterations_for_samples(consumed) == iteration
        assert schedule.iterations_for_samples(consumed + schedule.size(consumed) - 1) == iteration
        consumed += schedule.size(consumed)


def test_a_schedule_of_steps_is_followed_at_every_sample_count():
    schedule = BatchSizeSchedule(16, 2, 2, steps=((0, 4), (12, 8), (50, 16)))
    consumed = 0
    for iteration in range(20):
        assert schedule.size(consumed) == (16 if consumed >= 50 else 8 if consumed >= 12 else 4)
        assert schedule.samples_for_iterations(iteration) == consumed
        assert schedule.iterations_for_samples(consumed) == iteration
        consumed += schedule.size(consumed)
    assert schedule.all_micro_batches == [1, 2, 4]


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([[1, 8]], "starting at 0 samples"),
        ([[0, 4], [9, 6], [9, 8]], "growing samples"),
        ([[0, 8], [9, 4]], "ends with size 4, but train.global_batch_size is 8"),
        ([[0, 3], [9, 8]], r"a size of train.step_batch_size_schedule \(3\) is not"),
    ],
)
def test_a_schedule_of_steps_that_cannot_be_is_refused(steps, words):
    train = TrainConfig(global_batch_size=8, micro_batch_size=2, step_batch_size_schedule=steps)
    with pytest.raises(ConfigError, match=words):
        BatchSizeSchedule.from_config(train, 1)


def test_constant_batch_size():
    schedule = BatchSizeSchedule.from_config(TrainConfig(global_batch_size=24, micro_batch_size=2), 4)
    assert (schedule.size(0), schedule.size(10**12), schedule.micro_batches(5)) == (24, 24, 3)
    assert schedule.samples_for_iterations(7) == 168
    assert schedule.iterations_for_samples(191) == 7


def test_micro_batches_follow_the_ramp():
    train = TrainConfig(global_batch_size=32, micro_batch_size=2, rampup_batch_size=[8, 8, 96])
    schedule = BatchSizeSchedule.from_config(train, data_parallel_size=2)
    assert [schedule.micro_batches(n) for n in (0, 31, 32, 64, 96)] == [2, 2, 4, 6, 8]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((100, 8, 4), ["100", "micro_batch_size (8)", "data parallel (4)", "96 or 128"]),
        ((3, 8, 4), ["use 32"]),
        ((64, 4, 4, (8, 14, 100)), ["start", "(8)", "use 16"]),
        ((64, 4, 4, (16, 24, 100)), ["increment", "(24)", "16 or 32"]),
        ((64, 1, 1, (16, 20, 100)), ["64 − 16 = 48", "increment 20"]),
        ((64, 1, 1, (128, 8, 100)), ["[128, 8, 100]", "above", "64"]),
        ((64, 1, 1, (0, 8, 100)), ["[0, 8, 100]"]),
    ],
)
def test_impossible_batches_are_refused_with_the_numbers(arguments, words):
    with pytest.raises(ConfigError) as error:
        BatchSizeSchedule(*arguments)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_absent_global_batch_size_is_refused():
    with pytest.raises(ConfigError, match="global_batch_size is not set"):
        BatchSizeSchedule.from_config(TrainConfig(), 1)
