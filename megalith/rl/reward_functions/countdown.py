"""A reward for Countdown, as in TinyZero: write a formula of given numbers that has a given result."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Sequence

from megalith.rl.reward_functions.answers import column
from megalith.rl.rollouts.prompts import Prompt

FORMULA_CHARACTERS = 1000  # limit of countdown's formula, plus as many per number
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
SIGNS = {ast.USub: operator.neg, ast.UAdd: operator.pos}


def countdown(text: str, prompt: Prompt, ids: Sequence[int], max_tokens: int) -> float:
    """Return 1 if the last <answer> on the text's last line evaluates to the column `target` and uses each number of
    the column `nums` once."""
    target, nums = column(prompt, "target"), column(prompt, "nums")
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


def _whole_numbers(formula: ast.AST) -> list[int]:
    """Return the numbers in an arithmetic formula of integers. Raise ValueError if it is something else."""
    if isinstance(formula, ast.Constant) and type(formula.value) is int:
        return [formula.value]
    if isinstance(formula, ast.BinOp) and type(formula.op) in OPERATORS:
        return _whole_numbers(formula.left) + _whole_numbers(formula.right)
    if isinstance(formula, ast.UnaryOp) and type(formula.op) in SIGNS:
        return _whole_numbers(formula.operand)
    raise ValueError("not arithmetic")


def _value(formula: ast.AST) -> float:
    if isinstance(formula, ast.Constant):
        return formula.value
    if isinstance(formula, ast.UnaryOp):
        return SIGNS[type(formula.op)](_value(formula.operand))
    return OPERATORS[type(formula.op)](_value(formula.left), _value(formula.right))
