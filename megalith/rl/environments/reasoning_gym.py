"""Tasks of reasoning-gym by name: `rl.environment: reasoning_gym:basic_arithmetic`.

A prompt's record has the `seed` of its task, and optionally settings of the dataset. The question is appended to the
prompt. The answer is the text in <answer> tags, or the whole turn if it has no such tags.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megalith.errors import ConfigError, did_you_mean
from megalith.rl.agents.prompt_text import Message, with_text


def make_environment(identity: str) -> Callable[[Mapping[str, Any]], ReasoningTask]:
    """Return a factory that creates the task of a prompt from the prompt's columns.

    Raises:
        ConfigError: if reasoning-gym is not installed or has no such dataset.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"rl.environment is reasoning_gym:{identity}, but reasoning-gym cannot be imported ({error}); "
            "pip install reasoning-gym"
        ) from None
    if identity not in DATASETS:
        raise ConfigError(
            f"rl.environment is reasoning_gym:{identity}, which reasoning-gym does not have; choose one of its "
            f"{len(DATASETS)} datasets{did_you_mean(identity, DATASETS) or ''}"
        )
    names = {field.name for field in dataclasses.fields(DATASETS[identity][1])} - {"size"}

    def make(columns: Mapping[str, Any]) -> ReasoningTask:
        if "seed" not in columns:
            raise ValueError("the record has no column seed, which chooses the task; add one")
        settings = {name: value for name, value in columns.items() if name in names}
        return ReasoningTask(reasoning_gym.create_dataset(identity, size=1, **settings))

    return make


class ReasoningTask:
    """A question of a dataset, answered in one turn."""

    def __init__(self, dataset: Any):
        self._dataset, self._entry = dataset, dataset[0]

    def init(self, messages: Sequence[Message]) -> tuple[list[Message], dict[str, Any]]:
        """Return the prompt with the question."""
        return with_text(messages, self._entry["question"]), {}

    def step(self, text: str) -> dict[str, Any]:
        """Score the answer."""
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(text)
        reward = self._dataset.score_answer(text.strip() if answer is None else answer, self._entry)
        return {"observations": [], "reward": float(reward), "done": True}
