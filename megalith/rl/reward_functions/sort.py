"""A reward for sorting the numbers in a prompt, a small task that shows learning."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megalith.rl.reward_functions.answers import ITEM, parse_number
from megalith.rl.rollouts.prompts import Prompt


def sort(text: str, prompt: Prompt, ids: Sequence[int], max_tokens: int) -> float:
    """Return the fraction of positions at which the text's numbers equal the sorted numbers of the prompt's last line.

    In a conversation the prompt is its last message.
    """
    question = prompt.text if prompt.messages is None else prompt.messages[-1]["content"]
    expected = sorted(map(parse_number, re.findall(ITEM, question.strip().rpartition("\n")[2])))
    answer = [parse_number(one) for one in re.findall(ITEM, text)]
    correct = sum(a == b for a, b in zip(answer, expected))
    return correct / max(len(expected), len(answer), 1)
