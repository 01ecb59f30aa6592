"""The rewards that have a name: what a completion of a prompt is worth, by a formula of its text or its length.

gsm8k as verl computes it (strict: only what stands behind "####"), countdown as in TinyZero, and tasks small enough to
show that a policy learns. Columns of the prompt's record that they read: `answer` (or verl's
reward_model.ground_truth), `target` and `nums`, `length`.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megalith.rl.prompts import Prompt

NUMBER = r"-?\d[\d,]*(?:\.\d+)?"


def gsm8k(text: str, prompt: Prompt, ids: Sequence[int], longest: int) -> float:
    """1 where the last "#### number" is the answer's, commas removed (strict)."""
    found = re.findall(r"#### (-?[0-9.,]+)", text)
    return float(bool(found) and found[-1].replace(",", "") == _answer(prompt))


def gsm8k_flexible(text: str, prompt: Prompt, ids: Sequence[int], longest: int) -> float:
    """1 where the last number of the text is the answer."""
    return arithmetic(text, prompt, ids, longest)


def arithmetic(text: str, prompt: Prompt, ids: Sequence[int], longest: int) -> float:
    """1 where the last number of the text is the column `answer`."""
    found = re.findall(NUMBER, text)
    return float(bool(found) and _number(found[-1]) == _number(_answer(prompt)))


def countdown(text: str, prompt: Prompt, ids: Sequence[int], longest: int) -> float:
    """1 where the last <answer> computes the column `target`, with each of the column `nums` once."""
    target, nums = _column(prompt, "target"), _column(prompt, "nums")
    found = re.findall(r"<answer>(.*?)</answer>", text.strip().rpartition("\n")[2])
    if not found:
        return 0.0
    try:
        used: list[int] = []
        value = _value(ast.parse(found[-1].strip(), mode="eval").body, used)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return 0.0
    return float(Counter(used) == Counter(nums) and abs(value - target) < 1e-5)


def sort(text: str, prompt: Prompt, ids: Sequence[int], longest: int) -> float:
    """The share of places at which the text has the number that the prompt's last line has there, once sorted."""
    wanted = sorted(map(_number, re.findall(NUMBER, prompt.text.strip().rpartition("\n")[2])))
    found = [_number(one) for one in re.findall(NUMBER, text)]
    right = sum(a == b for a, b in zip(found, wanted))
    return right / max(len(wanted), len(found), 1)


def tagged(text: str, prompt: Prompt, ids: Sequence[int], longest: int) -> float:
    """1 where the text is <think>…</think> and then <answer>…</answer>, each once."""
    once = all(text.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    form = re.fullmatch(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", text, re.DOTALL)
    return float(once and form is not None)


def length(text: str, prompt: Prompt, ids: Sequence[int], longest: int) -> float:
    """1 − |tokens − the column `length`| / it, not below 0; without the column: the shorter the better, 0 to 1."""
    wanted = prompt.columns.get("length")
    if wanted is None:
        return 1 - len(ids) / longest
    return max(0.0, 1 - abs(len(ids) - wanted) / wanted)


NAMED: dict[str, Callable[[str, Prompt, Sequence[int], int], float]] = {
    "gsm8k": gsm8k,
    "gsm8k_flexible": gsm8k_flexible,
    "countdown": countdown,
    "arithmetic": arithmetic,
    "sort": sort,
    "format": tagged,
    "length": length,
}


def _column(prompt: Prompt, name: str) -> Any:
    value = prompt.columns.get(name)
    if value is None:
        there = f"only {', '.join(prompt.columns)}" if prompt.columns else "and no other beside the prompt's"
        raise ValueError(f"{prompt.where} has no column {name!r}, {there}")
    return value


def _answer(prompt: Prompt) -> str:
    """What stands behind "####" in the column `answer`, or verl's ground truth."""
    truth = ground_truth(prompt)
    return (
        str(_column(prompt, "answer") if truth is None else truth)
        .rpartition("####")[2]
        .strip()
        .replace(",", "")
    )


def ground_truth(prompt: Prompt) -> Any:
    """verl's: reward_model.ground_truth, else the column ground_truth, else answer."""
    inner = prompt.columns.get("reward_model")
    truth = inner.get("ground_truth") if isinstance(inner, Mapping) else None
    return next(
        (x for x in (truth, *map(prompt.columns.get, ("ground_truth", "answer"))) if x is not None), None
    )


def _number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return math.nan


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def _value(node: ast.AST, used: list[int]) -> float:
    """Of a sum of whole numbers; adds those that it has to `used`. ValueError: it is something else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError("not arithmetic")
