"""A reward for GSM8K's answer after "####", as verl computes it (strict)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from numbers import Real

from megalith.rl.reward_functions.answers import answer_of, parse_number, true_answer
from megalith.rl.rollouts.prompts import Prompt


def gsm8k(text: str, prompt: Prompt, ids: Sequence[int], max_tokens: int) -> float:
    """Return 1 if the last "#### number" is the answer, without commas.

    The texts must be equal (strict). If the prompt's answer is a number, not a text, the values must be equal.
    """
    matches, answer = re.findall(r"#### (-?[0-9.,]+)", text), answer_of(prompt)
    if not matches:
        return 0.0
    is_number = isinstance(true_answer(prompt), Real)
    return float(
        parse_number(matches[-1]) == parse_number(answer)
        if is_number
        else matches[-1].replace(",", "") == answer
    )
