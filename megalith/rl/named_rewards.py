"""Built-in rewards: functions of a completion's text or length.

gsm8k follows verl (strict: only the number after "####"), countdown follows TinyZero, and math_verify uses Hugging
Face's package. The others are small tasks that show learning. They read these columns of the prompt's record:
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
GROUPED = r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,]*\d)"  # such as 1,072: digits in groups of three
PLAIN = r"\d+(?:\.\d+)?"
NUMBER = rf"{SIGN}(?:{GROUPED}(?:\.\d+)?|{PLAIN})"
ITEM = SIGN + PLAIN  # in a list, where commas separate numbers
FORMULA_CHARACTERS = 1000  # limit of countdown's formula, plus as many per number
VERIFY_CHARACTERS, VERIFY_SECONDS = 4096, 2  # end of the text; limit for each of math-verify's two parts


def gsm8k(text: str, prompt: Prompt, ids: Sequence[int], max_tokens: int) -> float:
    """Return 1 if the last "#### number" is the answer, without commas.

    The text must be equal (strict), or the number if the column `answer` is a number.
    """
    matches, answer = re.findall(r"#### (-?[0-9.,]+)", text), _answer(prompt)
    if not matches:
        return 0.0
    is_number = isinstance(_truth(prompt), Real)
    return float(
        _number(matches[-1]) == _number(answer) if is_number else matches[-1].replace(",", "") == answer
    )


def gsm8k_flexible(text: str, prompt: Prompt, ids: Sequence[int], max_tokens: int) -> float:
    """Return 1 if the last number of the text is the answer."""
    return arithmetic(text, prompt, ids, max_tokens)


def arithmetic(text: str, prompt: Prompt, ids: Sequence[int], max_tokens: int) -> float:
    """Return 1 if the last number of the text is the column `answer`."""
    matches = re.findall(NUMBER, text)
    return float(bool(matches) and _number(matches[-1]) == _number(_answer(prompt)))


def countdown(text: str, prompt: Prompt, ids: Sequence[int], max_tokens: int) -> float:
    """Return 1 if the last <answer> evaluates to the column `target` and uses each number of the column `nums` once."""
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


def sort(text: str, prompt: Prompt, ids: Sequence[int], max_tokens: int) -> float:
    """Return the fraction of positions with the right number when the last line of the prompt is sorted.

    In a conversation the prompt is its last message.
    """
    question = prompt.text if prompt.messages is None else prompt.messages[-1]["content"]
    expected = sorted(map(_number, re.findall(ITEM, question.strip().rpartition("\n")[2])))
    answer = [_number(one) for one in re.findall(ITEM, text)]
    correct = sum(a == b for a, b in zip(answer, expected))
    return correct / max(len(expected), len(answer), 1)


def tagged(text: str, prompt: Prompt, ids: Sequence[int], max_tokens: int) -> float:
    """Return 1 if the text is <think>…</think> followed by <answer>…</answer>, each once."""
    once = all(text.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    form = re.fullmatch(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", text, re.DOTALL)
    return float(once and form is not None)


def length(text: str, prompt: Prompt, ids: Sequence[int], max_tokens: int) -> float:
    """Return 1 − |tokens − column `length`| / `length`, at least 0; without the column 1 − tokens / maximum."""
    target = prompt.columns.get("length")
    if target is None:
        return 1 - len(ids) / max_tokens
    return max(0.0, 1 - abs(len(ids) - target) / target)


def math_verify(text: str, prompt: Prompt, ids: Sequence[int], max_tokens: int) -> float:
    r"""Return 1 if the text's last \boxed{…}, or else its last formula or number, equals the answer by math-verify.

    1/2 equals 0.5. NaN (absent) if math-verify cannot parse the answer.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # math-verify's time limits are signals, which work only in the main thread.
    seconds = VERIFY_SECONDS if current_thread() is main_thread() else None
    extractors = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    answer = str(_truth(prompt)).rpartition("####")[2].strip().strip("$")
    boxed = answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"
    expected = parse(boxed, extractors, parsing_timeout=seconds)
    if not expected:
        return math.nan
    end = text[max(0, text.rfind("\\boxed")) :][-VERIFY_CHARACTERS:]
    parsed = parse(end, extractors, parsing_timeout=seconds)
    return float(verify(expected, parsed, timeout_seconds=seconds))


def require_math_verify() -> None:
    """Raise ConfigError if the math-verify package is missing."""
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "rl.reward_funcs has 'math_verify', which needs the math-verify package; run: "
            f"{install_line('math')}"
        ) from error


BUILTIN_REWARDS: dict[str, Callable[[str, Prompt, Sequence[int], int], float]] = {
    "gsm8k": gsm8k,
    "gsm8k_flexible": gsm8k_flexible,
    "countdown": countdown,
    "arithmetic": arithmetic,
    "sort": sort,
    "format": tagged,
    "length": length,
    "math_verify": math_verify,
}
SLOW_REWARDS = frozenset(
    {"math_verify"}
)  # their time depends on the completion, so they run in worker processes


def _column(prompt: Prompt, name: str) -> Any:
    value = prompt.columns.get(name)
    if value is None:
        others = f"only {', '.join(prompt.columns)}" if prompt.columns else "and no other columns"
        raise ValueError(f"{prompt.where} has no column {name!r}, {others}")
    return value


def _answer(prompt: Prompt) -> str:
    """Return the text after "####" in the column `answer`, or verl's ground truth, without commas."""
    return str(_truth(prompt)).rpartition("####")[2].strip().replace(",", "")


def _truth(prompt: Prompt) -> Any:
    """Return verl's ground truth, or else the column `answer`."""
    truth = ground_truth(prompt)
    return _column(prompt, "answer") if truth is None else truth


def ground_truth(prompt: Prompt) -> Any:
    """Return verl's reward_model.ground_truth, else the column ground_truth, else answer."""
    inner = prompt.columns.get("reward_model")
    truth = inner.get("ground_truth") if isinstance(inner, Mapping) else None
    return next(
        (x for x in (truth, *map(prompt.columns.get, ("ground_truth", "answer"))) if x is not None), None
    )


def _number(text: str) -> Decimal:
    """Return the text as a decimal number, NaN if it is none. Integers of any length stay exact."""
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return Decimal("NaN")


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def _whole_numbers(formula: ast.AST) -> list[int]:
    """Return the numbers in an arithmetic formula of integers. Raise ValueError if it is something else."""
    if isinstance(formula, ast.Constant) and type(formula.value) is int:
        return [formula.value]
    if isinstance(formula, ast.BinOp) and type(formula.op) in OPERATORS:
        return _whole_numbers(formula.left) + _whole_numbers(formula.right)
    raise ValueError("not arithmetic")


def _value(formula: ast.AST) -> float:
    if isinstance(formula, ast.Constant):
        return formula.value
    return OPERATORS[type(formula.op)](_value(formula.left), _value(formula.right))
