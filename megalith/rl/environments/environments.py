"""Environments: stateful objects in which the policy acts, one instance per completion.

| protocol | methods |
|---|---|
| TRL | `reset(**columns) -> str or None`, public methods as tools, optional `get_reward() -> float` at the end |
| SkyRL | `init(messages) -> (messages, info)`, `step(text) -> {observations, reward, done, …}` |

With TRL's protocol the policy calls methods as tools, and the text that `reset` returns is appended to the prompt. With
SkyRL's protocol, each turn is an action, the observations are appended after it as messages, and the reward is the sum
over the steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

from megalith.config.extensions import ENVIRONMENTS
from megalith.config.load_extension import load_extension
from megalith.errors import ConfigError
from megalith.rl.rewards.reward_number import reward_number
from megalith.rl.rollouts.prompts import Prompt
from megalith.rl.tools.tool_functions import Schema, answer_text, call_function, run_tool, tool_schema

Factory = Callable[..., Any]
SETTING = "rl.environment"
NO_TOOLS = ("reset", "get_reward")  # methods of TRL's protocol


class EnvironmentKind:
    """Factory for environments, given as a class or function, and the protocol that they follow."""

    def __init__(self, environment: str | Factory):
        """Load `path.py:Class` or `NAME:ID` of a library, or take a factory.

        Raises:
            ConfigError: if the environment does not exist or has none of the protocols.
        """
        if isinstance(environment, str):
            library, _, identity = environment.partition(":")
            self.takes_columns = library in ENVIRONMENTS
            if self.takes_columns:
                make = load_extension(library, ENVIRONMENTS, SETTING)
                self.factory: Factory = make(identity)
            else:
                self.factory = load_extension(environment, {}, SETTING)
            self.name = environment.rpartition(":")[2]
            if self.takes_columns:
                self.name = getattr(self.factory, "name", identity)
        else:
            self.factory, self.takes_columns = environment, False
            self.name = getattr(environment, "__name__", type(environment).__name__)
        self.steps = self.takes_columns
        """True if each turn is a step (SkyRL); False if the policy calls methods (TRL)."""
        self.methods: dict[str, Callable] = {}
        if not self.takes_columns:
            self._inspect()

    def _inspect(self) -> None:
        """Determine the protocol from the class without creating an instance. For any other factory, call it once."""
        example = None if inspect.isclass(self.factory) else self.factory()
        kind = self.factory if example is None else type(example)
        self.name = kind.__name__
        methods = dict(inspect.getmembers(kind, inspect.isfunction))
        self.steps = "init" in methods and "step" in methods
        self.has_reward = self.steps or "get_reward" in methods
        if self.steps:
            return
        if "reset" not in methods:
            raise ConfigError(
                f"{SETTING} is {self.name}, which defines neither reset (TRL's protocol) nor init and step "
                "(SkyRL's); add one of these sets of methods"
            )
        public = {name: one for name, one in methods.items() if name[:1] != "_" and name not in NO_TOOLS}
        self.methods = {name: MethodType(one, example or object()) for name, one in public.items()}

    has_reward = True
    """True if the environment rewards its completion."""

    def schemas(self) -> list[Schema]:
        """Return the JSON schemas of the environment's tools."""
        return [tool_schema(method, SETTING) for method in self.methods.values()]


class EnvironmentHost:
    """Runs one environment in a worker process. Jobs and results are JSON values.

    | job | result |
    |---|---|
    | ["start", prompt index] | {"messages": messages of the prompt} |
    | ["call", name, arguments] | {"text", "is_error", "seconds"} |
    | ["step", text] | {"messages", "reward", "done"} |
    | ["reward"] | {"reward"} |

    A job that raises returns {"failed": message}.
    """

    def __init__(self, kind: EnvironmentKind, prompts: Sequence[Prompt], prompt_column: str):
        self._kind, self._prompts, self._column = kind, prompts, prompt_column
        self._instance: Any = None

    def __call__(self, job: Sequence[Any]) -> dict[str, Any]:
        action, *arguments = job
        try:
            return getattr(self, f"_{action}")(*arguments)
        except Exception as error:
            return {"failed": answer_text(f"{action} raised {type(error).__name__}: {error}")}

    def _start(self, index: int) -> dict[str, Any]:
        prompt, kind = self._prompts[index], self._kind
        messages = [dict(one) for one in prompt.messages or ()]
        if kind.steps:
            if self._instance is not None and hasattr(self._instance, "close"):
                self._instance.close()
            self._instance = kind.factory(prompt.columns) if kind.takes_columns else kind.factory()
            return {"messages": _messages(self._instance.init(messages)[0])}
        if self._instance is None:
            self._instance = kind.factory()
        text = call_function(self._instance.reset, **{self._column: messages, **prompt.columns})
        if text is not None:
            if not isinstance(text, str):
                raise TypeError(f"reset returned a {type(text).__name__}; it must return text or None")
            messages[-1] = messages[-1] | {"content": messages[-1]["content"] + answer_text(text)}
        return {"messages": messages}

    def _call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        methods = {each: getattr(self._instance, each) for each in self._kind.methods}
        return run_tool(methods, name, arguments)

    def _step(self, text: str) -> dict[str, Any]:
        result = call_function(self._instance.step, text)
        return {
            "messages": _messages(result.get("observations") or ()),
            "reward": reward_number(result.get("reward", 0.0), "step returned the reward") or 0.0,
            "done": bool(result.get("done")),
        }

    def _reward(self) -> dict[str, Any]:
        return {
            "reward": reward_number(
                call_function(self._instance.get_reward), "get_reward returned the reward"
            )
        }


def _messages(values: Any) -> list[dict[str, Any]]:
    """Return messages {role, content} as JSON values. Raise TypeError for anything else."""
    messages = []
    for one in values:
        if not isinstance(one, Mapping) or not isinstance(one.get("role"), str):
            raise TypeError(
                f"it returned the observation {one!r:.60}; it must be a message with role and content"
            )
        messages.append({"role": one["role"], "content": answer_text(one.get("content", ""))})
    return messages
