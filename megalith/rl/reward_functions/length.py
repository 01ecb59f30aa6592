"""The length of a completion."""

from __future__ import annotations

from collections.abc import Sequence

from megalith.rl.prompts import Prompt


def length(text: str, prompt: Prompt, ids: Sequence[int], max_tokens: int) -> float:
    """Return 1 − |tokens − column `length`| / `length`, at least 0; without the column 1 − tokens / maximum."""
    target = prompt.columns.get("length")
    if target is None:
        return 1 - len(ids) / max_tokens
    return max(0.0, 1 - abs(len(ids) - target) / target)
