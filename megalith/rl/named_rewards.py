"""The rewards that have a name: what a completion of a prompt is worth, by a formula of its text or its length.

gsm8k as verl computes it (strict: only what stands behind "####"), countdown as in TinyZero, formulas by math-verify of
Hugging Face, and tasks small enough to show that a policy learns. Columns of the prompt's record that they read:
`answer` (or verl's reward_model.ground_truth), `target` and `nums`, `length`.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from numbers import Real
from threading import current_thread, main_thread
from typing import Any

from megalith.errors import ConfigError, install_line
from megalith.rl.prompts import Prompt

SIGN = r"(?:(?<![\w)\]}])-)?"  # a minus after a number, a name or a bracket subtracts
GROUPED = (
    r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,]*\d)"  # 1,072: in groups of three, the whole of what commas join
)
PLAIN = r"\d+(?:\.\d+)?"
NUMBER = rf"{SIGN}(?:{GROUPED}(?:\.\d+)?|{PLAIN})"
ITEM = SIGN + PLAIN  # of a list, whose commas part numbers
FORMULA_CHARACTERS = 1000  # of countdown's, and as many more for each of its numbers
VERIFY_CHARACTERS, VERIFY_SECONDS = 4096, 2  # of the end of a text, and for each of math-verify's two parts


def gsm8k(text: str, prompt: Prompt, ids: Sequence[int], longest: int) -> float:
    """1 where the last "#### number" is the answer's, commas removed: the same text (strict), or the same number where
    the column has no text but a number."""
    found, answer = re.findall(r"#### (-?[0-9.,]+)", text), _answer(prompt)
    if not found:
        return 0.0
    is_number = isinstance(_truth(prompt), Real)
    return float(_number(found[-1]) == _number(answer) if is_number else found[-1].replace(",", "") == answer)


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
    closed = text.strip().rpartition("\n")[2].split("</answer>")[:-1]
    formulas = [one.partition("<answer>")[2].strip() for one in closed if "<answer>" in one]
    if not formulas or len(formulas[-1]) > FORMULA_CHARACTERS * (1 + len(nums)):
        return 0.0
    try:
        formula = ast.parse(formulas[-1], mode="eval").body
        if Counter(_whole_numbers(formula)) != Counter(nums):
            return 0.0
        return float(abs(_value(formula) - target) < 1e-5)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return 0.0


def sort(text: str, prompt: Prompt, ids: Sequence[int], longest: int) -> float:
    """The share of places at which the text has the number that the prompt's last line has there, once sorted. Of a
    conversation the prompt is its last message."""
    asked = prompt.text if prompt.messages is None else prompt.messages[-1]["content"]
    wanted = sorted(map(_number, re.findall(ITEM, asked.strip().rpartition("\n")[2])))
    found = [_number(one) for one in re.findall(ITEM, text)]
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


def math_verify(text: str, prompt: Prompt, ids: Sequence[int], longest: int) -> float:
    """1 where the text's last \\boxed{…}, else its last formula or number, equals the answer by Hugging Face's
    math-verify: 1/2 is 0.5. NaN, an absent reward, where the answer is none that it can read."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # Its time limits are alarms, which only a main thread can set.
    seconds = VERIFY_SECONDS if current_thread() is main_thread() else None
    ways = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    answer = str(_truth(prompt)).rpartition("####")[2].strip().strip("$")
    boxed = answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"
    wanted = parse(boxed, ways, parsing_timeout=seconds)
    if not wanted:
        return math.nan
    end = text[max(0, text.rfind("\\boxed")) :][-VERIFY_CHARACTERS:]
    found = parse(end, ways, parsing_timeout=seconds)
    return float(verify(wanted, found, timeout_seconds=seconds))


def require_math_verify() -> None:
    """Raises ConfigError where the package is missing."""
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "rl.reward_funcs has 'math_verify', which needs the math-verify package, which is not installed; run: "
            f"{install_line('math')}"
        ) from error


NAMED: dict[str, Callable[[str, Prompt, Sequence[int], int], float]] = {
    "gsm8k": gsm8k,
    "gsm8k_flexible": gsm8k_flexible,
    "countdown": countdown,
    "arithmetic": arithmetic,
    "sort": sort,
    "format": tagged,
    "length": length,
    "math_verify": math_verify,
}
IN_PROCESSES = frozenset({"math_verify"})  # formulas whose time depends on the completion


def _column(prompt: Prompt, name: str) -> Any:
    value = prompt.columns.get(name)
    if value is None:
        there = f"only {', '.join(prompt.columns)}" if prompt.columns else "and no other beside the prompt's"
        raise ValueError(f"{prompt.where} has no column {name!r}, {there}")
    return value


def _answer(prompt: Prompt) -> str:
    """What stands behind "####" in the column `answer`, or verl's ground truth, without commas."""
    return str(_truth(prompt)).rpartition("####")[2].strip().replace(",", "")


def _truth(prompt: Prompt) -> Any:
    """verl's ground truth, or the column `answer`, which has to be there."""
    truth = ground_truth(prompt)
    return _column(prompt, "answer") if truth is None else truth


def ground_truth(prompt: Prompt) -> Any:
    """verl's: reward_model.ground_truth, else the column ground_truth, else answer."""
    inner = prompt.columns.get("reward_model")
    truth = inner.get("ground_truth") if isinstance(inner, Mapping) else None
    return next(
        (x for x in (truth, *map(prompt.columns.get, ("ground_truth", "answer"))) if x is not None), None
    )


def _number(text: str) -> Decimal:
    """The number of a text, NaN where it is none: whole ones of any length differ."""
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return Decimal("NaN")


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def _whole_numbers(formula: ast.AST) -> list[int]:
    """The numbers of a sum or product of whole numbers. ValueError: it is something else."""
    if isinstance(formula, ast.Constant) and type(formula.value) is int:
        return [formula.value]
    if isinstance(formula, ast.BinOp) and type(formula.op) in OPERATORS:
        return _whole_numbers(formula.left) + _whole_numbers(formula.right)
    raise ValueError("not arithmetic")


def _value(formula: ast.AST) -> float:
    if isinstance(formula, ast.Constant):
        return formula.value
    return OPERATORS[type(formula.op)](_value(formula.left), _value(formula.right))
