"""The schedule of a step under dynamic context parallelism."""

import numpy as np
import pytest

from megalith.data.dynamic_context import PassCosts, RankLimits, schedule_step


def lognormal(count: int, longest: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(np.log(longest / 20), 1.2, count).astype(np.int64), 1, longest)


@pytest.mark.parametrize(
    "limits",
    [
        RankLimits(1, 4096),
        RankLimits(4, 1024),
        RankLimits(4, 1030, multiple=16),
        RankLimits(8, 4096, min_degree=2),
        RankLimits(6, 2048),
    ],
    ids=str,
)
def test_each_sequence_is_in_one_group_that_has_room_for_it(limits):
    for seed in range(10):
        lengths = lognormal(70, 4096, seed)
        schedule = schedule_step(lengths, limits, PassCosts(1000, 1, 50, 1000))
        scheduled = []
        for groups in schedule.passes:
            assert sum(group.degree for group in groups) == limits.ranks
            first = 0
            for group in groups:
                assert group.first_rank == first and first % group.degree == 0
                assert group.degree in limits.degrees
                tokens = int(lengths[list(group.sequences)].sum())
                assert tokens <= group.length <= group.degree * (limits.room + limits.multiple)
                assert group.length % (group.degree * limits.multiple) == 0
                first += group.degree
                scheduled += group.sequences
        assert sorted(scheduled) == list(range(len(lengths)))
        assert all(len(schedule.of_rank(rank)) == len(schedule.passes) for rank in range(limits.ranks))


def test_equal_short_sequences_stay_on_one_rank_and_a_long_one_takes_all():
    limits, costs = RankLimits(4, 1024), PassCosts(1000, 1, 100, 0)
    short = schedule_step([100] * 40, limits, costs)
    assert [group.degree for groups in short.passes for group in groups] == [1, 1, 1, 1]
    mixed = schedule_step([4000, *[100] * 40], limits, costs)
    assert sorted(group.degree for groups in mixed.passes for group in groups) == [1, 1, 1, 1, 4]


def test_ranks_are_level_where_sequences_allow_it():
    """Compared with all sequences divided evenly, and with the work of the costs that the schedule reports."""
    limits, costs = RankLimits(8, 8192), PassCosts(4000, 1, 400, 0)
    for seed in range(5):
        lengths = lognormal(400, 32768, seed)
        schedule = schedule_step(lengths, limits, costs)
        slowest = 0
        for groups in schedule.passes:
            slowest += max(
                int(costs.on_rank(lengths[list(group.sequences)], group.degree).sum())
                for group in groups
                if group.sequences
            )
        assert schedule.cost == slowest
        assert schedule.cost < 1.15 * costs.work(lengths).sum() / limits.ranks


def test_a_step_without_sequences_has_one_pass_of_padding():
    [groups] = schedule_step([], RankLimits(4, 1024), PassCosts(1)).passes
    assert [(group.degree, group.sequences) for group in groups] == [(1, ())] * 4
    assert len({group.length for group in groups}) == 1
