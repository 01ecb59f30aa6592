"""Extracts the answers of prompts, and numbers in texts."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from megalith.rl.rollouts.prompts import Prompt

MINUS = "\N{MINUS SIGN}"  # typeset, unlike the hyphen of a keyboard
SIGN = rf"(?:(?<![\w)\]}}])[-{MINUS}])?"  # a minus after a number, a name or a bracket subtracts
GROUPED = r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,]*\d)"  # such as 1,072: digits in groups of three
PLAIN = r"(?:\d+(?:\.\d+)?|(?<![\w.])\.\d+)(?:[eE][-+]?\d{1,3}(?!\w))?"  # such as 12, 0.5, .5 and 1e-3
NUMBER = rf"{SIGN}(?:{GROUPED}(?:\.\d+)?|{PLAIN})"
ITEM = SIGN + PLAIN  # in a list, where commas separate numbers


def column(prompt: Prompt, name: str) -> Any:
    value = prompt.columns.get(name)
    if value is None:
        others = f"only {', '.join(prompt.columns)}" if prompt.columns else "and no other columns"
        raise ValueError(f"{prompt.where} has no column {name!r}, {others}")
    return value


def answer_of(prompt: Prompt) -> str:
    """Return `true_answer` without commas. If it contains "####", return only the text after that mark."""
    return str(true_answer(prompt)).rpartition("####")[2].strip().replace(",", "")


def true_answer(prompt: Prompt) -> Any:
    """Return `ground_truth`. Raise ValueError if the prompt has no such column."""
    truth = ground_truth(prompt)
    return column(prompt, "answer") if truth is None else truth


def ground_truth(prompt: Prompt) -> Any:
    """Return verl's reward_model.ground_truth, else the column ground_truth, else answer."""
    inner = prompt.columns.get("reward_model")
    truth = inner.get("ground_truth") if isinstance(inner, Mapping) else None
    return next(
        (x for x in (truth, *map(prompt.columns.get, ("ground_truth", "answer"))) if x is not None), None
    )


def parse_number(text: str) -> Decimal:
    """Parse the text as a Decimal, ignoring commas, or NaN if it is not a number.

    Integers of any length stay exact.
    """
    try:
        return Decimal(text.replace(",", "").replace(MINUS, "-"))
    except InvalidOperation:
        return Decimal("NaN")
