"""Segments of a trajectory: which tokens of a completion the model sampled.

A rollout of several turns is a prompt followed by segments that the model sampled and segments that the chat template
added between them, such as a tool's answer with its header. Segment lengths alternate, beginning with a sampled one:

    prompt_ids │ call of a tool </s> │ answer of the tool, next header │ final answer </s>
               │ sampled: 12         │ added: 30                       │ sampled: 9         segments (12, 30, 9)

Loss, log-probabilities, KL, drift and entropy are over sampled tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megalith.errors import DataError

Segments = tuple[int, ...]
"""Lengths of the segments in tokens, sampled and added alternately."""


def sampled_mask(segments: Segments) -> np.ndarray:
    """Return a mask of the tokens that the model sampled, bool [tokens]."""
    return np.repeat(np.arange(len(segments)) % 2 == 0, segments)


def check_segments(where: str, value: Any, tokens: int) -> Segments | None:
    """Return the segments of a completion of a rollout file, or None if it has none.

    Args:
        where: file, line and sample, for errors.
        value: JSON value of `segments`.
        tokens: tokens of the completion.

    Raises:
        DataError: if the value is not a list of lengths that add up to `tokens`.
    """
    if value is None:
        return None
    is_valid = isinstance(value, list) and all(type(length) is int and length >= 0 for length in value)
    if not is_valid or sum(value) != tokens:
        raise DataError(
            f"{where} has segments {value!r:.60} for {tokens} completion_ids; they must alternate between numbers of "
            "sampled and of added tokens, start with sampled ones, and add up to the number of completion_ids"
        )
    return tuple(value)


def append_segment(segments: Sequence[int], tokens: int, is_sampled: bool) -> list[int]:
    """Return the segments, extended by `tokens` tokens that were sampled (`is_sampled`) or added."""
    result = list(segments)
    if not tokens:
        return result
    if not result and not is_sampled:
        result.append(0)
    if (len(result) % 2 == 0) == is_sampled:
        return [*result, tokens]
    result[-1] += tokens
    return result
