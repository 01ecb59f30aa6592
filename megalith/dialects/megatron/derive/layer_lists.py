"""Parses layer lists in flags: a number, or a Python list of 0 and 1 such as ([1]*3+[0])*2."""

from __future__ import annotations

import ast
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megalith.dialects.megatron.flag_kinds import ParsedFlags


MOST_LAYERS = 10_000


def layer_list(flags: ParsedFlags, flag: str, text: Any) -> int | list[int] | None:
    """Parse a number, or lists of numbers with `*` and `+` such as `([0]*3+[1]*58)`.

    Any other text adds a problem to `flags` and gives None.
    """

    def value(node: ast.expr) -> int | list[int]:
        match node:
            case ast.Constant(value=int(number)) if type(number) is int and abs(number) < MOST_LAYERS:
                return number
            case ast.List(elts=elements):
                return [value(element) for element in elements]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value(left) + value(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                factors = value(left), value(right)
                if math.prod(len(x) if isinstance(x, list) else abs(x) for x in factors) < MOST_LAYERS:
                    return factors[0] * factors[1]
        raise ValueError(ast.unparse(node))

    try:
        return value(ast.parse(str(text).strip(), mode="eval").body)
    except (ValueError, SyntaxError, TypeError, RecursionError):
        flags.problems.append(
            f"{flag} is {text!r}: it must be a number, or lists of numbers with * and +, like ([0]*3+[1]*58)"
        )
        return None
