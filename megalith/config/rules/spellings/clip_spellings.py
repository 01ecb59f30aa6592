"""verl's and NeMo-RL's spellings of the bounds of the ratio."""

from __future__ import annotations

from typing import Any

from megalith.config.rules.spellings.loss_spellings import cispo_bounds, dual_clip
from megalith.config.rules.spellings.spelling import RATIO_CLIP, Rl, is_cispo


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def clip(value: Any, rl: Rl) -> dict[str, Any]:
    """Return the settings of verl's clip_ratio, which clip_ratio_low and clip_ratio_high override."""
    low = {} if rl.get("clip_ratio_low") is not None else clip_low(value, rl)
    is_set = rl.get("clip_ratio_high") is not None or rl.get("epsilon_high") is not None
    return low if is_set else {**low, **clip_high(value, rl)}


def clip_low(value: Any, rl: Rl) -> dict[str, Any]:
    if is_cispo(rl) and _is_number(value):
        return {"cispo_ratio_min": max(0.0, 1 - value)}
    return {"epsilon": value}


def clip_high(value: Any, rl: Rl) -> dict[str, Any]:
    return {"epsilon_high": 1 + value if is_cispo(rl) and _is_number(value) else value}


def other_clip(value: Any, rl: Rl) -> dict[str, Any]:
    return cispo_bounds(value, rl) if is_cispo(rl) else {"epsilon_high": RATIO_CLIP}


def other_clip_and_dual_clip(value: Any, rl: Rl) -> dict[str, Any]:
    return {**other_clip(value, rl), **dual_clip(value, rl)}
