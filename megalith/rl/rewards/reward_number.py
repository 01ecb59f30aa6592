"""Rewards that users' agents and environments return."""

from __future__ import annotations

import math
from typing import Any


def reward_number(value: Any, returned: str) -> float | None:
    """Return a reward as a float, or NaN for an absent one (None or NaN).

    Args:
        value: the returned object, a number or a tensor or array with one.
        returned: beginning of the error, such as "it returned".

    Raises:
        TypeError: if the value is neither a finite number nor absent.
    """
    value = value.item() if hasattr(value, "item") else value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if not isinstance(value, int | float) or math.isinf(value):
        raise TypeError(f"{returned} {value!r:.60}; it must be a finite number or None")
    return float(value)
