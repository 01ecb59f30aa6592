"""Environments by TRL's and SkyRL's protocols: one instance per completion, and one that fails loses its own alone."""

import os
import sys
import time
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from test_agents import turn_number
from tool_policy import add, call, rollouts, tokenizer_in

from megalith.config.rl import RlConfig
from megalith.errors import ConfigError, DataError
from megalith.rl.agents.policy_agent import PolicyAgent


class Guessing:
    """TRL's protocol: guess the number of the row."""

    def reset(self, number: int, **columns) -> str:
        self._number, self._guesses, self._is_right = number, 0, False
        assert columns["prompt"][-1]["role"] == "user"
        return f" (between 0 and {number + 5})"

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: the guess.
        """
        self._guesses += 1
        self._is_right |= number == self._number
        return "right" if number == self._number else "higher" if number < self._number else "lower"

    def get_reward(self) -> float:
        return self._is_right / max(self._guesses, 1)


class Fragile(Guessing):
    """Fails by number, in the way that the guess says."""

    def reset(self, number: int, **columns) -> None:
        if number == 2:
            raise ValueError("no such game")
        super().reset(number, **columns)

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: the guess.
        """
        if self._number == 0:
            os._exit(5)
        if self._number == 1:
            time.sleep(60)
        if self._number == 3:
            raise RuntimeError("not today")
        return super().guess(number)


class Counting:
    """SkyRL's protocol: the policy must write the next number, for three steps."""

    def init(self, messages):
        self.step_number = 0
        return [*messages[:-1], {"role": "user", "content": "count from 1"}], {}

    def step(self, action: str):
        self.step_number += 1
        is_done = self.step_number == 3
        observations = [] if is_done else [{"role": "user", "content": f"after {action}?"}]
        return {"observations": observations, "reward": 0.25 * (action == str(self.step_number)), "done": is_done,
                "metadata": {}}  # fmt: skip


PROMPTS = [{"prompt": f"game {number}", "number": number} for number in range(5)]


def guesses(text: str, generation: int) -> str:
    """Go up from 0 by as much as the generation's number plus one; say so once it is right."""
    if text.rpartition("<tool_response>")[2].startswith("\nright"):
        return "done"
    return call("guess", number=turn_number(text) * (generation + 1))


def test_each_completion_has_its_own_instance_by_trls_protocol(tmp_path):
    arguments = dict(
        prompts=PROMPTS, tools=(add,), environment=Guessing, generations=2, rewards=[], max_turns=5
    )
    groups, logged, tokenizer = rollouts(tmp_path, guesses, tool_workers=1, max_tokens=1000, **arguments)
    for number, group in enumerate(groups):
        first, second = group.completions
        prompt = tokenizer.decode(group.prompt_of(first))
        assert f"game {number} (between 0 and {number + 5})<|im_end|>" in prompt and '"guess"' in prompt
        assert '"add"' in prompt and group.prompt_ids.tolist() != group.prompt_of(first).tolist()
        guesses_needed = number + 1  # the first goes up by 1, the second by 2
        assert first.rewards.tolist() == [1 / guesses_needed if guesses_needed < 5 else 0.0]
        assert second.rewards.tolist() == [0.0 if number % 2 else 1 / (number // 2 + 1)]
    assert max(logged["environments_lost"]) == 0 and set(logged) >= {
        "tools/guess/seconds",
        "tools/guess/errors",
    }
    again, _, _ = rollouts(tmp_path, guesses, max_tokens=1000, **arguments)  # without processes
    for group, other in zip(groups, again, strict=True):
        for one, same in zip(group.completions, other.completions, strict=True):
            assert one.ids.tolist() == same.ids.tolist() and one.rewards.tolist() == same.rewards.tolist()


def test_an_environment_that_fails_ends_its_own_completion(tmp_path):
    groups, logged, _ = rollouts(
        tmp_path, guesses, prompts=PROMPTS, tools=None, environment=Fragile, rewards=["length"], max_turns=7,
        tool_workers=1, tool_timeout=1.5, max_tokens=1000,
    )  # fmt: skip
    crashed, hung, unstarted, raising, fine = [group.completions[0] for group in groups]
    assert logged["environments_lost"] == [1, 1, 1, 0, 0]
    for one in (crashed, hung, unstarted):
        assert len(one.messages) == 1 and np.isnan(one.rewards[1]) and not np.isnan(one.rewards[0])
    assert "error: guess raised RuntimeError: not today" in raising.messages[1]["content"]
    assert fine.rewards[1] == 1 / 5 and fine.messages[-1]["content"] == "done"
    with pytest.raises(DataError, match=r"no environment Fragile can be started.*ValueError: no such game"):
        rollouts(tmp_path, guesses, prompts=PROMPTS[2:3], tools=None, environment=Fragile, rewards=["length"])


def test_each_turn_is_a_step_by_skyrls_protocol(tmp_path):
    def script(text, generation):
        return str(turn_number(text) + 1 + (generation == 1 and turn_number(text) == 1))

    groups, logged, tokenizer = rollouts(
        tmp_path, script, prompts=PROMPTS[:2], tools=None, environment=Counting, rewards=[], generations=2
    )
    right, wrong = groups[0].completions
    assert (right.rewards, wrong.rewards) == ([0.75], [0.5]) and logged["turns"] == [3] * 4
    assert tokenizer.decode(groups[0].prompt_of(right)).count("count from 1") == 1
    text = "1<|im_end|>\n<|im_start|>user\nafter 1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>"
    assert tokenizer.decode(right.ids).startswith(text)
    assert tokenizer.decode(right.ids[right.sampled]) == "1<|im_end|>2<|im_end|>3<|im_end|>"
    assert [one["role"] for one in right.messages] == ["assistant", "user", "assistant", "user", "assistant"]


def test_skyrl_gym_makes_environments_of_rows_by_name(tmp_path, monkeypatch):
    """A stand-in for the package: its registry and make."""

    def make(identity, env_config, extras):
        assert (identity, env_config, extras["number"]) == ("count", {}, 0)
        return Counting()

    package = ModuleType("skyrl_gym")
    package.make, package.envs = make, SimpleNamespace(registration=SimpleNamespace(registry={"count": 0}))
    monkeypatch.setitem(sys.modules, "skyrl_gym", package)
    rl = dict(tools=None, rewards=[], prompts=PROMPTS[:1])
    groups, _, _ = rollouts(
        tmp_path, lambda text, _: str(turn_number(text) + 1), environment="skyrl_gym:count", **rl
    )
    assert groups[0].completions[0].rewards == [0.75]
    with pytest.raises(
        ConfigError, match="skyrl_gym:gsm8k, which skyrl-gym does not have; choose one of count"
    ):
        rollouts(tmp_path, guesses, environment="skyrl_gym:gsm8k", **rl)


def test_an_unusable_environment_is_named(tmp_path):
    tokenizer = tokenizer_in(tmp_path / "tokenizer")

    def agent(environment, **rl):
        return PolicyAgent(
            RlConfig(prompts="x", environment="environment_factory", **rl), tokenizer, None, environment
        )

    with pytest.raises(ConfigError, match="SimpleNamespace, which defines neither reset"):
        agent(SimpleNamespace)
    silent = type("Silent", (), {"reset": lambda self, **columns: None})
    with pytest.raises(
        ConfigError, match=r"rl\.reward_funcs is not set, and the environment has no get_reward"
    ):
        agent(silent)
    assert agent(silent, reward_funcs="length").reward_name is None
    assert agent(lambda: Guessing()).reward_name == "Guessing"
    with pytest.raises(ValueError, match="write a built-in name or path"):
        RlConfig(prompts="x", environment="skyrl_gym")
