"""Collective error handling: every rank learns each rank's result, so that all continue or all stop.

A save or load that fails on one rank fails on all: if one rank stopped alone, the others would wait for it. Each
phase therefore runs on every rank, and every rank receives all results.

Messages are JSON in CPU tensors, so that nothing is unpickled. The group needs a CPU backend (gloo). A background save
uses its own group, because messages of two threads in one group would mix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megalith.comm.collectives import Axis, gather_json
from megalith.errors import CheckpointError


def collectively(world: Axis, work: Callable[[], Any]) -> list[Any]:
    """Run `work` on every rank and return every rank's result, which must be a JSON value.

    If it raises on any rank, every rank raises CollectiveError with the ranks' reasons.
    """
    value, error = None, None
    try:
        value = work()
    except Exception as raised:
        error = raised
    outcomes = gather_json([value, error and _sentence(error)], world)
    reasons = {rank: reason for rank, (_, reason) in enumerate(outcomes) if reason}
    if reasons:
        raise CollectiveError(reasons, world.size) from error
    return [value for value, _ in outcomes]


class CollectiveError(CheckpointError):
    """Raised on all ranks if some ranks failed."""

    def __init__(self, reasons: Mapping[int, str], world_size: int):
        by_reason: dict[str, list[int]] = {}
        for rank, reason in reasons.items():
            by_reason.setdefault(reason, []).append(rank)
        texts = [
            reason if world_size == 1 or len(ranks) == world_size else f"{_ranks(ranks)}: {reason}"
            for reason, ranks in by_reason.items()
        ]
        super().__init__("; ".join(texts))


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
