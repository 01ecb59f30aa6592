"""Rounds: groups of parameters that are updated together. Sharded matrices of a round are collected on their owners."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from torch import nn

from megalith.optim.optimizer import TrainedParameter

ROUND_ELEMENTS = 2**27
"""Approximate number of elements of the matrices that a rank owns in one round."""


def is_shared(item: TrainedParameter) -> bool:
    """Return True if several ranks hold shards of the parameter's matrices."""
    return item.placement.shared is not None and item.placement.shared.ranks > 1


def rounds_of(items: Iterable[TrainedParameter]) -> list[list[nn.Parameter]]:
    """Divide parameters whose matrices are shared by ranks into rounds: lists of parameters whose matrices are
    collected together.
    """
    rounds, latest = [], {}
    for item in items:
        placement = item.placement
        key, size = placement.shared.key, math.prod(placement.shape) // placement.shared.ranks
        if key not in latest or latest[key][1] + size > ROUND_ELEMENTS:
            latest[key] = [], 0
            rounds.append(latest[key][0])
        latest[key][0].append(item.parameter)
        latest[key] = latest[key][0], latest[key][1] + size
    return rounds


def local_rounds(items: Iterable[TrainedParameter]) -> Iterator[list[nn.Parameter]]:
    """Divide parameters whose matrices are not shared into rounds: lists with at most about ROUND_ELEMENTS elements."""
    current, size = [], 0
    for item in items:
        if current and size + item.parameter.numel() > ROUND_ELEMENTS:
            yield current
            current, size = [], 0
        current.append(item.parameter)
        size += item.parameter.numel()
    if current:
        yield current
