"""Advantages by turn: discounted returns from each turn on, compared turn by turn within a group."""

import numpy as np
import pytest
from tool_policy import rollouts

from megalith.config.rl import RlConfig
from megalith.rl.advantages.turn_advantages import turn_returns
from megalith.rl.rollouts.rollout_metrics import batch_advantages, batch_token_advantages
from megalith.rl.rollouts.rollout_reader import RolloutFiles, load_rollouts
from megalith.rl.rollouts.rollouts import Rollouts, save_rollouts

GAMMA, WEIGHTS = 0.5, [2.0, 3.0]


class Walk:
    """SkyRL's protocol: the reward of a step is the number that the policy writes, until it writes 0."""

    def init(self, messages):
        return messages, {}

    def step(self, action: str):
        return {
            "observations": [{"role": "user", "content": "and?"}],
            "reward": float(action),
            "done": action == "0",
        }


WALKS = ["1 4 0", "2 0", "8 0", "3 2 2 0"]


def walked(tmp_path, **rl):
    def script(text, generation):
        return WALKS[generation].split()[text.count("<|im_start|>assistant") - 1]

    return rollouts(
        tmp_path, script, tools=None, environment=Walk, generations=4, rewards=["length"],
        prompts=[{"prompt": "walk", "length": 20}], step_discount=GAMMA, **rl,
    )[0]  # fmt: skip


def test_returns_and_advantages_are_those_of_the_formula(tmp_path):
    (group,) = walked(tmp_path)
    settings = dict(
        prompts="x", reward_funcs="length", environment="environment_factory", reward_weights=WEIGHTS
    )
    rl = RlConfig(**settings, advantage_level="turn", step_discount=GAMMA, scale_rewards="none")
    advantages, expected = batch_advantages(rl, [group]), []
    for one, walk in zip(group.completions, WALKS, strict=True):
        steps = np.array(walk.split(), float)
        assert list(one.turn_rewards) == steps.tolist()
        powers = GAMMA ** np.arange(len(steps))
        assert one.rewards[1] == steps @ powers  # the completion's own
        other = WEIGHTS[0] * one.rewards[0]
        expected.append([
            WEIGHTS[1] * steps[t:] @ powers[: len(steps) - t] + powers[len(steps) - 1 - t] * other
            for t in range(len(steps))
        ])  # fmt: skip
    for one, returns, total in zip(group.completions, expected, advantages.rewards[0].tolist()):
        # the sum has the other reward undiscounted
        assert turn_returns(rl, one, total)[-1] == pytest.approx(returns[-1])
        assert turn_returns(rl, one, total) == pytest.approx(returns)
    (values,) = batch_token_advantages(rl, [group], advantages)
    for one, value, returns in zip(group.completions, values, expected):
        ends = np.cumsum(one.segments)
        for t, mine in enumerate(returns):
            same_turn = [each[t] for each in expected if len(each) > t]
            begin = 0 if t == 0 else ends[2 * t - 1]
            assert value[begin : ends[2 * t]] == pytest.approx(mine - np.mean(same_turn)), (
                one.turn_rewards,
                t,
            )
    trajectory = batch_token_advantages(
        rl.model_copy(update={"advantage_level": "trajectory"}), [group], advantages
    )
    assert trajectory == advantages.values.tolist()


def test_files_keep_the_rewards_of_turns(tmp_path):
    groups = walked(tmp_path)
    save_rollouts(tmp_path / "a.jsonl", Rollouts(groups, ["length", "Walk"]))
    lazily = RolloutFiles([str(tmp_path / "a.jsonl")])
    for loaded in (load_rollouts(tmp_path / "a.jsonl").groups, lazily.read(lazily.entries)):
        assert [list(one.turn_rewards) for one in loaded[0].completions] == [
            list(one.turn_rewards) for one in groups[0].completions
        ]
