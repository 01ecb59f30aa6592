"""Environments by TRL's and SkyRL's protocols: one instance per completion, and one that fails loses its own alone."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
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
    with pytest.raises(DataError, match=r"no environment Fragile could be started.*ValueError: no such game"):
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


class Arithmetic:
    """A stand-in for a dataset of reasoning-gym."""

    def __init__(self, size: int, seed: int, largest: int = 9):
        assert size == 1
        self.entry = {"question": f"What is {seed} + {largest}?", "answer": str(seed + largest)}

    def __getitem__(self, index: int) -> dict:
        return [self.entry][index]

    def score_answer(self, answer: str, entry: dict) -> float:
        return 1.0 if answer == entry["answer"] else 0.25 * (entry["answer"] in answer)


@dataclass
class ArithmeticConfig:
    size: int = 500
    seed: int | None = None
    largest: int = 9


def test_reasoning_gym_asks_a_rows_question_and_scores_the_answer(tmp_path, monkeypatch):
    package, factory, utils = (
        ModuleType(name) for name in ("reasoning_gym", "reasoning_gym.factory", "reasoning_gym.utils")
    )
    package.create_dataset = lambda name, **settings: Arithmetic(**settings)
    factory.DATASETS = {"sums": (Arithmetic, ArithmeticConfig)}
    utils.extract_answer = lambda text: text.partition("<answer>")[2].partition("</answer>")[0] or None
    for module in (package, factory, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    rl = dict(tools=None, rewards=[], generations=3)
    prompts = [{"prompt": "Answer in <answer>.", "seed": 4, "largest": 3}]

    def script(text, generation):
        return ["<answer>7</answer>", "it is 7", "8"][generation]

    groups, logged, tokenizer = rollouts(
        tmp_path, script, environment="reasoning_gym:sums", prompts=prompts, **rl
    )
    assert [one.rewards for one in groups[0].completions] == [[1.0], [0.25], [0.0]] and logged["turns"] == [
        1
    ] * 3
    prompt = tokenizer.decode(groups[0].prompt_of(groups[0].completions[0]))
    assert "Answer in <answer>.\n\nWhat is 4 + 3?<|im_end|>" in prompt
    with pytest.raises(ConfigError, match=r"reasoning_gym:sum, which .* 1 datasets; did you mean 'sums'"):
        rollouts(tmp_path, script, environment="reasoning_gym:sum", prompts=prompts, **rl)
    with pytest.raises(DataError, match="the record has no column seed"):
        rollouts(tmp_path, script, environment="reasoning_gym:sums", prompts=[{"prompt": "x"}], **rl)


class Game:
    """A stand-in for a game of TextArena; `as_text` as its default wrappers show it."""

    def __init__(self, as_text: bool):
        self.as_text, self.history, self.news, self.is_over = as_text, "", [], False

    def reset(self, num_players: int, seed: int | None) -> None:
        assert num_players == 1, f"The number of players has to be 2, received {num_players}"
        self.number = seed
        self._say(-1, "Guess the number.")

    def _say(self, sender: int, text: str) -> None:
        self.history += f"\n[{'GAME' if sender < 0 else 'Player'}] {text}"
        self.news.append((sender, text, "kind"))

    def get_observation(self) -> tuple:
        news, self.news = self.news, []
        return 0, self.history if self.as_text else news

    def step(self, action: str) -> tuple:
        self._say(0, action)
        self.is_over = int(action.strip("[]")) == self.number
        if not self.is_over:
            self._say(-1, "higher")
        return self.is_over, {}

    def close(self) -> tuple:
        return {0: 0.5}, {0: {}}


@pytest.mark.parametrize("as_text", [True, False])
def test_textarena_plays_a_game_for_one_player(tmp_path, monkeypatch, as_text):
    package, envs, registration = (
        ModuleType(name) for name in ("textarena", "textarena.envs", "textarena.envs.registration")
    )
    package.make = lambda identity: Game(as_text)
    registration.ENV_REGISTRY = {"Guess-v0": None}
    for module in (package, envs, registration):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    groups, logged, tokenizer = rollouts(
        tmp_path, lambda text, _: f"[{turn_number(text) + 1}]", environment="textarena:Guess-v0",
        tools=None, rewards=[], prompts=[{"prompt": "Play.", "seed": 3}],
    )  # fmt: skip
    (one,) = groups[0].completions
    assert one.rewards == [0.5] and logged["turns"] == [3]
    assert "Guess the number.<|im_end|>" in tokenizer.decode(groups[0].prompt_of(one))
    said = [message["content"] for message in one.messages]
    assert said == ["[1]", "[GAME] higher" if as_text else "higher", "[2]", said[1], "[3]"]


def test_openenv_sends_turns_as_the_text_of_an_action(tmp_path, monkeypatch):
    class Session:
        """A stand-in for a client of openenv-core."""

        def __init__(self, base_url: str):
            self.count = 0

        def sync(self):
            return self

        def connect(self) -> None:
            pass

        def reset(self, seed: int):
            return SimpleNamespace(
                observation={"prompt": f"say {seed}", "done": False}, reward=None, done=False
            )

        def step(self, action: dict):
            self.count += 1
            observation = {"said": action["message"], "count": self.count}
            return SimpleNamespace(observation=observation, reward=0.25, done=self.count == 2)

        def close(self) -> None:
            pass

    package, core = ModuleType("openenv"), ModuleType("openenv.core")
    core.GenericEnvClient = Session
    monkeypatch.setitem(sys.modules, "openenv", package)
    monkeypatch.setitem(sys.modules, "openenv.core", core)
    texts = {"message": {"type": "string"}, "metadata": {"type": "object"}}
    schema = {"action": {"properties": texts, "required": ["message"]}}
    with json_server({"/schema": schema}) as url:
        rl = dict(tools=None, rewards=[], prompts=[{"prompt": "Speak.", "seed": 3}])
        groups, _, tokenizer = rollouts(
            tmp_path, lambda text, _: str(turn_number(text)), environment=f"openenv:{url}", **rl
        )
        texts["other"] = {"type": "string"}
        schema["action"]["required"] = []
        with pytest.raises(
            DataError, match="fields message, metadata, other, 2 of them text; only actions with one text"
        ):
            rollouts(tmp_path, guesses, environment=f"openenv:{url}", **rl)
    (one,) = groups[0].completions
    assert one.rewards == [0.5] and one.messages[1]["content"] == '{"said": "0", "count": 1}'
    assert "Speak.\n\nsay 3<|im_end|>" in tokenizer.decode(groups[0].prompt_of(one))
    with pytest.raises(ConfigError, match="must be an address such as"):
        rollouts(tmp_path, guesses, environment="openenv:here", **rl)


@contextmanager
def json_server(answers: dict[str, dict]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            content = json.dumps(answers[self.path]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
