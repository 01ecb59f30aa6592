"""A reward that compares the last number of the text with the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megalith.rl.reward_functions.answers import NUMBER, answer_of, parse_number
from megalith.rl.rollouts.prompts import Prompt


def arithmetic(text: str, prompt: Prompt, ids: Sequence[int], max_tokens: int) -> float:
    """Return 1 if the last number of the text is the prompt's answer (`answer_of`)."""
    matches = re.findall(NUMBER, text)
    return float(bool(matches) and parse_number(matches[-1]) == parse_number(answer_of(prompt)))
