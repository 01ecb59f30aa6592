"""A reward for the length of a completion."""

from __future__ import annotations

from collections.abc import Sequence

from megalith.rl.rollouts.prompts import Prompt


def length(text: str, prompt: Prompt, ids: Sequence[int], max_tokens: int) -> float:
    """Return 1 − |tokens − target| / target, at least 0, where target is the column `length`.

    Without the column, return 1 − tokens / maximum.
    """
    target = prompt.columns.get("length")
    if target is None:
        return 1 - len(ids) / max_tokens
    return max(0.0, 1 - abs(len(ids) - target) / target)
