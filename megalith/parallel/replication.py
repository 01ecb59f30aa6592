"""The record of a chunk's replicated plain parameters. DTensors record their replication in their placements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from megalith.comm.collectives import Axis

if TYPE_CHECKING:
    from megalith.parallel.data.replicas import Replicated


@dataclass(frozen=True)
class Replication:
    """Replicated plain parameters, and the object that all-reduces their gradients."""

    axes: Mapping[str, Axis]
    """Axis of the ranks that replicate each parameter, by name."""
    reducer: Replicated | None = None
    """The reducer of the chunk's gradients; None unless data parallelism replicates the chunk (no_shard)."""


def record_replication(chunk: nn.Module, replication: Replication) -> None:
    """Attach the record to a chunk."""
    chunk.replication = replication


def replica_axes(chunk: nn.Module) -> Mapping[str, Axis]:
    """Return the axes that replicate plain parameters of a chunk, by name."""
    replication = getattr(chunk, "replication", None)
    return {} if replication is None else replication.axes
