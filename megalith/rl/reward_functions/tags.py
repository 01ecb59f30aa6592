"""A reward for the form <think>…</think><answer>…</answer>."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megalith.rl.rollouts.prompts import Prompt


def tagged(text: str, prompt: Prompt, ids: Sequence[int], max_tokens: int) -> float:
    """Return 1 if the text is <think>…</think> followed by <answer>…</answer>, each once."""
    once = all(text.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    form = re.fullmatch(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", text, re.DOTALL)
    return float(once and form is not None)
