"""Criteria that reject sampled tokens and sequences (`rl.rollout_rs`), in verl's notation."""

from __future__ import annotations

import math
from typing import NamedTuple

from megalith.errors import ConfigError

CRITERIA = (
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2",
    "seq_mean_k3", "seq_max_k2", "seq_max_k3",
)  # fmt: skip


class Criterion(NamedTuple):
    """Bounds of a divergence between the trained policy and the engine's."""

    level: str
    """Aggregation over the tokens of a sequence: token (none), seq_sum, seq_mean or seq_max."""
    estimator: str
    """k1, k2 or k3, with d = log π_old − log π_rollout: −d, d² / 2, or exp(d) − 1 − d."""
    low: float
    high: float


def rejection_criteria(names: str, thresholds: float | str | None) -> list[Criterion]:
    """Parse the values of rl.rollout_rs and rl.rollout_rs_threshold.

    Args:
        names: criteria, separated by commas.
        thresholds: one for all, or one per criterion, separated by commas. That of k1 is "lower_upper", the
            bounds of the ratio, or an upper bound, whose inverse is the lower one.

    Raises:
        ConfigError: for other values.
    """
    criteria = list(dict.fromkeys(part.strip() for part in names.split(",") if part.strip()))
    unknown = [name for name in criteria if name not in CRITERIA]
    if unknown or not criteria:
        raise ConfigError(f"rl.rollout_rs is {names!r}; write one or more of {', '.join(CRITERIA)}")
    if thresholds is None:
        raise ConfigError(
            f"rl.rollout_rs is {names!r}, but rl.rollout_rs_threshold is not set; set rl.rollout_rs_threshold, for "
            "example to 0.5_2 for k1, or to 0.1 for k2 and k3"
        )
    texts = [part.strip() for part in str(thresholds).split(",") if part.strip()]
    if len(texts) not in (1, len(criteria)):
        raise ConfigError(
            f"rl.rollout_rs_threshold has {len(texts)} thresholds for {len(criteria)} criteria ({names}); write a "
            "single threshold, or one per criterion"
        )
    return [
        Criterion(*name.rsplit("_", 1), *_bounds(name, text))
        for name, text in zip(criteria, texts * len(criteria) if len(texts) == 1 else texts)
    ]


def _bounds(name: str, text: str) -> tuple[float, float]:
    """Return the bounds of a criterion's divergence."""
    low, has_two, high = text.partition("_")
    is_k1 = name.endswith("k1")
    try:
        bounds = (float(low), float(high)) if has_two else (1 / float(low), float(low))
    except (ValueError, ZeroDivisionError):
        bounds = (0.0, 0.0)
    if (not 0 < bounds[0] <= bounds[1] and (is_k1 or has_two or bounds[1] <= 0)) or (has_two and not is_k1):
        form = (
            '"lower_upper" of the ratio, or an upper bound of at least 1'
            if is_k1
            else "an upper bound above 0"
        )
        raise ConfigError(f"rl.rollout_rs_threshold is {text!r} for {name}; write {form}")
    return (math.log(bounds[0]), math.log(bounds[1])) if is_k1 else (-math.inf, bounds[1])
