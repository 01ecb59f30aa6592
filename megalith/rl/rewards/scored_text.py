"""A completion that a reward model scores."""

from __future__ import annotations

from typing import Any, NamedTuple

from megalith.rl.rollouts.prompts import Prompt


class ScoredText(NamedTuple):
    """A prompt with a completion."""

    prompt: Prompt
    ids: list[int]
    """The completion's tokens."""
    text: str
    """The completion, without special tokens."""
    has_ended: bool
    messages: list[dict[str, Any]] | None = None
    """Messages of a completion of several turns."""
