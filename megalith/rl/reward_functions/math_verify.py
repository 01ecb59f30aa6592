"""A reward that compares formulas with Hugging Face's math-verify."""

from __future__ import annotations

import math
from collections.abc import Sequence
from threading import current_thread, main_thread

from megalith.errors import ConfigError, install_line
from megalith.rl.reward_functions.answers import true_answer
from megalith.rl.rollouts.prompts import Prompt

VERIFY_CHARACTERS, VERIFY_SECONDS = 4096, 2  # end of the text; limit for each of math-verify's two parts


def math_verify(text: str, prompt: Prompt, ids: Sequence[int], max_tokens: int) -> float:
    r"""Return 1 if the text's last \boxed{…}, or else its last formula or number, equals the answer by math-verify.

    1/2 equals 0.5. Only the last VERIFY_CHARACTERS of the text are read. NaN (absent) if math-verify cannot parse the
    answer.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # math-verify's time limits are signals, which work only in the main thread.
    seconds = VERIFY_SECONDS if current_thread() is main_thread() else None
    extractors = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    answer = str(true_answer(prompt)).rpartition("####")[2].strip().strip("$")
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


math_verify.requires = require_math_verify  # called before a run
math_verify.is_slow = True  # its time depends on the completion, so it runs in worker processes
