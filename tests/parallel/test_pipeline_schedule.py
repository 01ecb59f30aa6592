"""Properties of every schedule over a wide range of stages, micro-batches and chunks."""

from collections.abc import Sequence

import pytest
from schedule_check import (
    one_for_all,
    one_per_link,
    one_per_pass,
    peak_in_flight,
    violations,
)

from megalith.errors import ConfigError
from megalith.parallel.pipeline.schedules import (
    Action,
    Kind,
    StageIndex,
    build_forward_schedule,
    build_schedule,
    check_schedule,
    fitting_micro_batches,
    in_flight_bound,
)

MICRO_BATCHES, VIRTUAL = range(1, 25), range(2, 5)


def sizes_of(stages: Sequence[int], micro_batches: Sequence[int], grouped: Sequence[int]) -> dict[str, list]:
    """Return stages, micro-batches, chunks and perhaps a group's size for each kind of schedule.

    Args:
        stages: numbers of stages, 1 first.
        micro_batches: numbers of micro-batches.
        grouped: numbers of stages for which groups of more micro-batches than stages are tried.
    """
    return {
        "1f1b": [(s, m, 1) for s in stages for m in micro_batches],
        "zero_bubble": [(s, m, 1) for s in stages for m in micro_batches],
        "interleaved": [(s, m, v) for s in stages[1:] for m in micro_batches if m % s == 0 for v in VIRTUAL]
        + [
            (s, m, v, g)
            for s in grouped
            for m in range(s, 16)
            for g in (s + 1, 2 * s, m)
            if not 0 < m % g < s
            for v in VIRTUAL
        ],
    }


# By default every small number, numbers that do not divide each other, and three times as many micro-batches as stages.
SIZES = sizes_of((1, 2, 3, 4, 5, 8), (*range(1, 11), 13, 16, 17, 24), (2, 3))
kinds_and_sizes = pytest.mark.parametrize(
    ("kind", "cases"),
    [pytest.param(kind, cases, id=kind) for kind, cases in SIZES.items()]
    + [
        pytest.param(kind, cases, id=f"{kind}, all", marks=pytest.mark.full)
        for kind, cases in sizes_of(range(1, 9), MICRO_BATCHES, (2, 3, 6)).items()
    ],
)


@kinds_and_sizes
def test_every_size_is_complete_in_order_and_free_of_deadlock(kind, cases):
    for sizes in cases:
        assert violations(build_schedule(kind, *sizes)) == [], sizes


@kinds_and_sizes
def test_a_number_of_micro_batches_is_raised_to_the_next_that_fits(kind, cases):
    for stages, virtual, group in {(sizes[0], sizes[2], *sizes[3:], None)[:3] for sizes in cases}:
        for micro_batches in MICRO_BATCHES:
            count = fitting_micro_batches(kind, stages, micro_batches, group)
            check_schedule(kind, stages, count, virtual, group)
            for lower in range(micro_batches, count):
                with pytest.raises(ConfigError):
                    check_schedule(kind, stages, lower, virtual, group)


@kinds_and_sizes
def test_in_flight_activations_reach_the_bound_and_never_pass_it(kind, cases):
    for sizes in cases:
        schedule = build_schedule(kind, *sizes)
        for rank, actions in enumerate(schedule.actions):
            assert peak_in_flight(actions) == in_flight_bound(schedule, rank), (sizes, rank)


def test_the_bounds_are_those_of_the_papers():
    assert [in_flight_bound(build_schedule("1f1b", 4, 8), rank) for rank in range(4)] == [4, 3, 2, 1]
    assert [in_flight_bound(build_schedule("1f1b", 4, 2), rank) for rank in range(4)] == [2, 2, 2, 1]
    assert [in_flight_bound(build_schedule("zero_bubble", 4, 8), rank) for rank in range(4)] == [4, 4, 4, 4]
    interleaved = build_schedule("interleaved", 4, 8, 2)
    assert [in_flight_bound(interleaved, rank) for rank in range(4)] == [11, 9, 7, 5]
    in_groups = build_schedule("interleaved", 4, 16, 2, 8)
    assert [in_flight_bound(in_groups, rank) for rank in range(4)] == [15, 13, 11, 9]


def test_forward_passes_alone_take_any_number_of_micro_batches():
    for stages in (1, 2, 4, 8):
        for micro_batches in (1, 3, 8, 13):
            for virtual in (1, 2, 3):
                schedule = build_forward_schedule(stages, micro_batches, virtual)
                assert violations(schedule) == [], (stages, micro_batches, virtual)


def test_1f1b_on_two_ranks_is_this_list():
    forward, backward = Kind.FORWARD, Kind.BACKWARD
    first, last = build_schedule("1f1b", 2, 3).actions
    order = [(forward, 0), (forward, 1), (backward, 0), (forward, 2), (backward, 1), (backward, 2)]
    assert first == [Action(*pair) for pair in order]
    assert last == [Action(kind, m) for m in range(3) for kind in (forward, backward)]


def test_the_interleaved_order_is_megatrons():
    first = build_schedule("interleaved", 2, 4, 2).actions[0]
    forward = [action[1:] for action in first if action.kind is Kind.FORWARD]
    backward = [action[1:] for action in first if action.kind is Kind.BACKWARD]
    assert forward == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    assert backward == [(0, 1), (1, 1), (0, 0), (1, 0), (2, 1), (3, 1), (2, 0), (3, 0)]
    assert [action.kind for action in first[:5]] == [
        Kind.FORWARD
    ] * 5  # 2 · (S − 1) + (V − 1) · S, and the first of a pair


def test_transfers_go_around_the_ranks_from_chunk_to_chunk():
    schedule = build_schedule("interleaved", 4, 4, 2)
    assert schedule.source(0, Action(Kind.FORWARD, 0, 0)) is None
    assert schedule.target(3, Action(Kind.FORWARD, 0, 0)) == StageIndex(0, 1)
    assert schedule.source(0, Action(Kind.FORWARD, 0, 1)) == StageIndex(3, 0)
    assert schedule.target(3, Action(Kind.FORWARD, 0, 1)) is None
    assert schedule.target(0, Action(Kind.BACKWARD, 0, 1)) == StageIndex(3, 0)
    assert build_schedule("zero_bubble", 2, 2).target(1, Action(Kind.BACKWARD_WEIGHT, 0)) is None


SCHEDULES = [("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2)]


@pytest.mark.parametrize(("kind", "virtual"), SCHEDULES)
@pytest.mark.parametrize("stages", [2, 4])
def test_waiting_for_each_send_deadlocks(kind, virtual, stages):
    assert violations(build_schedule(kind, stages, 8, virtual), one_per_link, wait_for_sends=True)


@pytest.mark.parametrize(("kind", "virtual"), SCHEDULES)
@pytest.mark.parametrize("stages", [2, 4])
def test_one_communicator_for_both_passes_deadlocks(kind, virtual, stages):
    assert violations(build_schedule(kind, stages, 8, virtual), one_for_all)


def test_one_communicator_a_pass_is_enough_for_1f1b_but_deadlocks_when_interleaved():
    assert violations(build_schedule("1f1b", 4, 8), one_per_pass) == []
    assert violations(build_schedule("interleaved", 4, 8, 2), one_per_pass)


def test_the_checker_finds_what_is_missing_doubled_or_out_of_order():
    schedule = build_schedule("1f1b", 2, 3)
    schedule.actions[0].remove(Action(Kind.BACKWARD, 1))
    assert violations(schedule) == ["rank 0: micro-batch 1 of chunk 0 has ['forward']"]

    schedule = build_schedule("1f1b", 2, 3)
    schedule.actions[1].append(Action(Kind.FORWARD, 2))
    assert "has ['forward', 'backward', 'forward']" in violations(schedule)[0]

    schedule = build_schedule("zero_bubble", 1, 1)
    schedule.actions[0][1:] = reversed(schedule.actions[0][1:])
    assert "['forward', 'backward weight', 'backward input']" in violations(schedule)[0]

    schedule = build_schedule("1f1b", 1, 1)
    schedule.actions[0].append(Action(Kind.FORWARD, 1))
    assert "is of no micro-batch or chunk" in violations(schedule)[0]


def test_the_checker_finds_too_many_in_flight_and_ranks_that_wait_for_each_other():
    schedule = build_schedule("1f1b", 2, 3)
    schedule.actions[1].sort(key=lambda action: action.kind is Kind.BACKWARD)
    assert violations(schedule) == ["rank 1 holds 3 micro-batches at a time, more than 1"]

    schedule = build_schedule("1f1b", 2, 3)
    first = schedule.actions[0]
    first[1], first[2] = first[2], first[1]  # backward 0 before forward 1: no harm
    assert violations(schedule) == []
    last = schedule.actions[1]
    last[0:2], last[2:4] = last[2:4], last[0:2]  # but now rank 1 wants micro-batch 1 first
    assert [text.split(" at ")[0] for text in violations(schedule)] == ["rank 0 is stuck", "rank 1 is stuck"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpipe", 2, 4), "pipeline_schedule is 'gpipe'; choose one of 1f1b, interleaved, zero_bubble"),
        (("1f1b", 2, 0), "the number of micro-batches is 0; it must be at least 1"),
        (
            ("interleaved", 4, 6, 2),
            "6 micro-batches per step are not divisible .* so that there are 4 or 8, or",
        ),
        (("interleaved", 4, 3, 2), "so that there are 4, or leave virtual_pipeline_model_parallel_size out"),
        (("interleaved", 4, 8, 1), "virtual_pipeline_model_parallel_size 1; raise both"),
        (
            ("interleaved", 4, 8, 2, 3),
            "is 3 for 8 micro-batches .*_size 4, .* leave it out or set it to 4 or 8",
        ),
        (
            ("interleaved", 4, 9, 2, 8),
            "is 8 for 9 micro-batches .* the last one too, .* leave it out or set it to 5 or 9",
        ),
        (("1f1b", 4, 8, 1, 4), "is 4, but pipeline_schedule 1f1b has one chunk"),
        (
            ("zero_bubble", 4, 8, 2),
            "is 2; set virtual_pipeline_model_parallel_size to 1, or pipeline_schedule to interleaved",
        ),
    ],
)
def test_impossible_sizes_are_refused_with_the_way_out(arguments, message):
    with pytest.raises(ConfigError, match=message):
        build_schedule(*arguments)
