"""The simulated time of every schedule equals its formula."""

import pytest

from megalith.parallel.pipeline.schedules import Kind, build_schedule
from megalith.parallel.pipeline.simulate import Durations, few_micro_batches_warning, simulate

# By default every small number, numbers that do not divide each other, and up to three times as many micro-batches as
# stages.
ranges = pytest.mark.parametrize(
    ("stages_of", "micro_batches_of"),
    [
        pytest.param((1, 2, 3, 4, 5, 8), (*range(1, 11), 13, 16, 17, 24), id="some"),
        pytest.param(range(1, 9), range(1, 25), id="all", marks=pytest.mark.full),
    ],
)


@ranges
@pytest.mark.parametrize("durations", [Durations(1, 1, 1), Durations(3, 2, 4)])
def test_1f1b_waits_for_one_micro_batch_less_than_there_are_stages(durations, stages_of, micro_batches_of):
    whole = durations.forward + durations.backward_input + durations.backward_weight
    for stages in stages_of:
        for micro_batches in micro_batches_of:
            timeline = simulate(build_schedule("1f1b", stages, micro_batches), durations)
            assert timeline.total == (micro_batches + stages - 1) * whole
            assert timeline.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))


@ranges
@pytest.mark.parametrize("virtual", [2, 3, 4])
def test_interleaving_divides_the_bubble_by_the_chunks(virtual, stages_of, micro_batches_of):
    for stages in stages_of[1:]:
        for micro_batches in range(stages, micro_batches_of[-1] + 1, stages):
            timeline = simulate(build_schedule("interleaved", stages, micro_batches, virtual))
            assert timeline.total == 3 * (virtual * micro_batches + stages - 1)
            bubble = (stages - 1) / (virtual * micro_batches + stages - 1)
            assert timeline.bubble == pytest.approx(bubble)


@pytest.mark.parametrize(
    "stages_of", [(1, 2, 3, 5, 8), pytest.param(range(1, 9), marks=pytest.mark.full)], ids=["some", "all"]
)
@pytest.mark.parametrize("virtual", [2, 3, 4])
def test_larger_groups_have_the_same_bubble_and_hide_transfers(virtual, stages_of):
    for stages in stages_of[1:]:
        for groups in (1, 3):
            sizes = ("interleaved", stages, 2 * stages * groups, virtual)
            slow = Durations(1, 1, 1, p2p=0.25)
            free, hidden = (
                simulate(build_schedule(*sizes, 2 * stages), each) for each in (Durations(), slow)
            )
            assert free.total == simulate(build_schedule(*sizes)).total
            # What is left are the transfers of the first micro-batch through the ranks and of the last one back.
            assert hidden.total <= free.total + 2 * (stages - 1) * 0.25
            assert simulate(build_schedule(*sizes), slow).total > free.total + 2 * (virtual - 1) * 0.25


@ranges
@pytest.mark.parametrize("durations", [(1, 1, 1), (2, 2, 1), (3, 2, 2), (4, 5, 4), (2, 1, 1)])
def test_zero_bubble_waits_for_forward_and_input_less_weights(durations, stages_of, micro_batches_of):
    forward, inputs, weights = durations
    for stages in stages_of:
        for micro_batches in (count for count in micro_batches_of if count >= stages):
            timeline = simulate(build_schedule("zero_bubble", stages, micro_batches), Durations(*durations))
            assert timeline.total == micro_batches * sum(durations) + (stages - 1) * (
                forward + inputs - weights
            )


@ranges
def test_zero_bubble_is_never_slower_than_1f1b(stages_of, micro_batches_of):
    for stages in stages_of:
        for micro_batches in micro_batches_of:
            for durations in (Durations(1, 1, 1), Durations(2, 2, 3), Durations(1, 2, 1, p2p=0.3)):
                split = simulate(build_schedule("zero_bubble", stages, micro_batches), durations).total
                assert split <= simulate(build_schedule("1f1b", stages, micro_batches), durations).total


def test_a_transfer_delays_what_needs_it_and_nothing_else():
    timeline = simulate(build_schedule("1f1b", 2, 1), Durations(1, 1, 1, p2p=0.25))
    spans = [(span.action.kind, span.start, span.end) for spans in timeline.spans for span in spans]
    assert spans == [
        (Kind.FORWARD, 0.0, 1.0),
        (Kind.BACKWARD, 4.5, 6.5),
        (Kind.FORWARD, 1.25, 2.25),
        (Kind.BACKWARD, 2.25, 4.25),
    ]


def test_the_slowest_stage_sets_the_pace():
    slow = [Durations(), Durations(3, 3, 3), Durations(), Durations()]
    timeline = simulate(build_schedule("1f1b", 4, 16), slow)
    assert timeline.busy(1) == 16 * 9
    assert timeline.total >= 16 * 9
    assert timeline.bubble > 0.5


def test_fewer_micro_batches_than_stages_are_told_with_their_bubble():
    assert few_micro_batches_warning(build_schedule("1f1b", 4, 4)) is None
    warning = few_micro_batches_warning(build_schedule("1f1b", 4, 2))
    assert warning.startswith(
        "2 micro-batches per step are fewer than the 4 pipeline stages: the ranks wait 60%"
    )
    assert "raise global_batch_size" in warning
