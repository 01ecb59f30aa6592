"""Rewards become advantages by the formulas, and what is absent, without spread or too long counts as it says."""

import numpy as np
import pytest

from megalith.config import RlConfig, RunConfig
from megalith.errors import ConfigError
from megalith.rl.advantages.advantages import compute_advantages, overlong_penalty

NAN = float("nan")
REWARDS = np.array([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0], [0.0, NAN, 3.0, 6.0]])[..., None]
LENGTHS = np.full((3, 4), 5)


def found(rewards=REWARDS, lengths=LENGTHS, **rl):
    return compute_advantages(RlConfig(rollouts="x", **rl), rewards, lengths)


def test_by_group_mean_and_unbiased_deviation():
    result = found()
    s = np.std([1, 0, 0, 1], ddof=1) + 1e-4
    assert result.values[0] == pytest.approx(np.array([0.5, -0.5, -0.5, 0.5]) / s, rel=1e-12)
    assert (result.values[1] == 0).all() and result.group_std[1] == 0
    assert result.values[2] == pytest.approx(
        np.array([-3, 0, 0, 3]) / (3 + 1e-4), rel=1e-12
    )  # NaN is in no baseline
    assert np.isnan(result.rewards[2, 1])


def test_by_the_batch_or_not_at_all():
    there = REWARDS[~np.isnan(REWARDS)]
    plain = found(scale_rewards="none").values
    assert plain[2] == pytest.approx([-3, 0, 0, 3])
    assert found(scale_rewards="batch").values == pytest.approx(
        plain / (np.std(there, ddof=1) + 1e-4), rel=1e-12
    )


def test_leave_one_out_takes_the_mean_of_the_others():
    values = found(advantage_baseline="leave_one_out", scale_rewards="none").values
    assert values[0] == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert values[2] == pytest.approx([-4.5, 0, 0, 4.5])


def test_nemo_rls_names_take_mean_and_deviation_of_the_others():
    """r_i less the others' mean, over the others' deviation + 1e-6 where it is not 0."""
    rl = RunConfig.from_tree({"rl": {"normalize_rewards": True, "use_leave_one_out_baseline": True}}).rl
    rewards = np.array(
        [[1.0, 0.0, 0.5, 1.0], [100.1, 0.3, 0.3, 0.3], [0.0, NAN, 3.0, 6.0], [NAN, 1.0, NAN, 3.0]]
    )
    values = compute_advantages(rl, rewards[..., None], np.full((4, 4), 5)).values
    for group, found_ in zip(rewards, values):
        for number, reward in enumerate(group):
            others = np.delete(group, number)
            others = others[~np.isnan(others)]
            deviation = np.std(others, ddof=1) if len(others) > 1 else 0.0
            scale = deviation + 1e-6 if deviation > 1e-8 else 1.0
            expected = 0.0 if np.isnan(reward) else (reward - others.mean()) / scale
            assert found_[number] == pytest.approx(expected, rel=1e-9)


def test_verls_name_brings_its_epsilon():
    rl = RunConfig.from_tree({"rl": {"norm_adv_by_std_in_grpo": True}}).rl
    expected = np.array([0.5, -0.5, -0.5, 0.5]) / (np.std([1, 0, 0, 1], ddof=1) + 1e-6)
    assert compute_advantages(rl, REWARDS, LENGTHS).values[0] == pytest.approx(expected, rel=1e-12)


def test_a_lone_reward_of_a_group_has_advantage_0():
    rewards = np.array([[5.0, NAN, NAN, NAN]])[..., None]
    for baseline in ("group", "leave_one_out"):
        assert (found(rewards, LENGTHS[:1], advantage_baseline=baseline).values == 0).all()


def test_several_rewards_are_weighted_and_summed_first_over_those_that_are_there():
    rewards = np.array([[[1.0, 2.0], [NAN, 4.0], [3.0, NAN], [NAN, NAN]]])
    result = found(rewards, LENGTHS[:1], reward_weights=[2.0, 0.5], scale_rewards="none")
    assert result.rewards[0, :3] == pytest.approx([3.0, 2.0, 6.0]) and np.isnan(result.rewards[0, 3])
    assert result.values[0] == pytest.approx(np.array([-2 / 3, -5 / 3, 7 / 3, 0]))
    with pytest.raises(ConfigError, match="reward_weights has 1 weights, but each rollout has 2 rewards"):
        found(rewards, LENGTHS[:1], reward_weights=[1.0])


BATCH = np.array([[1.0, 0.0, 0.25, 1.0], [2.0, 2.0, 2.0, 2.0], [0.0, -1.5, 3.0, 6.0]])
BATCH_LENGTHS = np.array([[3, 5, 2, 7], [4, 4, 1, 6], [2, 8, 5, 3]])
VERL = {  # computed by the functions of verl/trainer/ppo/core_algos.py (b178a3c) for this batch
    "rloo": [[0.58333333, -0.75, -0.41666667, 0.58333333], [0, 0, 0, 0], [-2.5, -4.5, 1.5, 5.5]],
    "reinforce_plus_plus": [[-0.12515642, -0.66931475, -0.53327517, -0.12515642], [0.41900192] * 4,
                            [-0.66931475, -1.48555225, 0.96316025, 2.59563524]],
    "reinforce_plus_plus_baseline": [[0.37708051, -0.18259372, -0.04267516, 0.37708051], [0.13222304] * 4,
                                     [-0.91716613, -1.75667747, 0.76185654, 2.44087921]],
    "opo": [[0.38235294, -0.61764706, -0.36764706, 0.38235294], [0, 0, 0, 0],
            [-1.16666667, -2.66666667, 1.83333333, 4.83333333]],
    "gpg": [[0.525, -0.675, -0.375, 0.525], [0, 0, 0, 0], [-2.25, -4.05, 1.35, 4.95]],
    "grpo_passk": [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0.90197496]],
}  # fmt: skip


@pytest.mark.parametrize("name", VERL)
def test_an_estimator_of_verls_name_computes_verls_values(name):
    rl = RunConfig.from_tree({"rl": {"adv_estimator": name}}).rl
    assert rl.advantage_estimator == name
    values = compute_advantages(rl, BATCH[..., None], BATCH_LENGTHS).values
    assert values == pytest.approx(np.array(VERL[name]), abs=2e-7)
    # an absent reward is not in any baseline: the others have the advantages of the batch without it
    absent = np.concatenate([BATCH, np.full((3, 1), NAN)], axis=1)
    lengths = np.concatenate([BATCH_LENGTHS, np.full((3, 1), 100)], axis=1)
    with_absent = compute_advantages(rl, absent[..., None], lengths).values
    assert with_absent[:, :4] == pytest.approx(values, abs=1e-12) and (with_absent[:, 4] == 0).all()


@pytest.mark.parametrize("name", ["rloo", "opo", "gpg", "grpo_passk", "gdpo"])
def test_a_lone_reward_has_advantage_0_with_every_estimator_by_group(name):
    rewards = np.array([[5.0, NAN, NAN], [NAN, NAN, NAN]])[..., None]
    assert (found(rewards, LENGTHS[:2, :3], advantage_estimator=name).values == 0).all()


def test_gdpo_standardizes_each_reward_before_the_sum():
    """Values computed by TRL 1.16's GRPOTrainer with multi_objective_aggregation normalize_then_sum."""
    rewards = np.array([[1.0, 0.2], [0.0, NAN], [0.25, 0.7], [1.0, -0.4], [2.0, 1.0], [2.0, 0.0], [NAN, 0.5],
                        [NAN, NAN], [0.0, 3.0], [-1.5, 3.0], [3.0, 3.0], [6.0, 3.0]]).reshape(3, 4, 2)  # fmt: skip
    trl = [[1.17549972, -1.45933265, -0.16332899, 0.44716192], [0.66854965, -0.66854965, 0, 0],
           [-0.75389711, -1.3570148, 0.45233827, 1.65857364]]  # fmt: skip
    rl = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]}
    rl = RunConfig.from_tree({"rl": rl}).rl
    assert compute_advantages(rl, rewards, LENGTHS).values == pytest.approx(np.array(trl), abs=1e-6)


def test_gdpo_counts_the_overlong_penalty_as_one_more_reward():
    lengths, buffer = np.array([[12, 20, 16, 5]]), dict(max_completion_length=20, overlong_buffer_len=8)
    values = found(REWARDS[:1], lengths, advantage_estimator="gdpo", **buffer).values
    penalty = -overlong_penalty(RlConfig(rollouts="x", **buffer), lengths)
    both = np.stack([REWARDS[:1, :, 0], penalty], axis=-1)
    assert values == pytest.approx(found(both, lengths, advantage_estimator="gdpo").values, rel=1e-9)


def test_the_overlong_penalty_grows_over_the_buffer():
    rl = RlConfig(rollouts="x", max_completion_length=20, overlong_buffer_len=8, overlong_penalty_factor=2.0)
    assert overlong_penalty(rl, np.array([1, 12, 14, 20, 25])) == pytest.approx([0, 0, 0.5, 2.0, 2.0])
    lengths = np.array([[20, 5, 5, 20]])
    result = found(REWARDS[:1], lengths, max_completion_length=20, overlong_buffer_len=8)
    assert result.rewards[0] == pytest.approx([0, 0, 0, 0])
