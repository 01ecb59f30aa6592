"""Who saves what: each piece of a run's state once, the bytes spread evenly over the ranks that hold copies.

Every rank tells its boxes and makes the same plan from all of them. A box that several ranks hold (under data
parallelism without sharding, or a norm under tensor parallelism) goes to the one of them that has least to write so
far, the largest boxes first.

PyTorch's planner (torch.distributed.checkpoint) was weighed and left: it plans over DTensors, and our optimizer state
is plain local shards whose padding rows are cut off, each of which would have to be dressed as a DTensor with a
placement that does not exist; its plans and metadata are pickled between ranks and into the checkpoint; and what it
gives, this file has in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalith.checkpoint.agree import exchange
from megalith.checkpoint.extent import Extent
from megalith.checkpoint.files import DTYPE_CODES, DTYPES, byte_count
from megalith.checkpoint.manifest import TensorRecord
from megalith.comm import Axis
from megalith.parallel.shards import Box

Boxes = Mapping[str, Mapping[str, Box]]  # by part and name


@dataclass(frozen=True)
class Plan:
    """What is stored, and this rank's share of the writing."""

    table: dict[str, dict[str, TensorRecord]]
    """Every global tensor of the world, by part and name: the same on every rank."""

    share: list[tuple[str, str]]
    """Part and name of the boxes that this rank writes."""


def make_plan(boxes: Boxes, world: Axis) -> Plan:
    """The plan for `boxes`, of which each rank of the world gives its own; every rank calls it."""
    return divide(exchange(entries(boxes), world), world.rank)


def entries(boxes: Boxes) -> list[list[Any]]:
    """What a rank tells of its boxes, plain JSON: part, name, type, global shape, offset and shape of the box."""
    return [
        [part, name, DTYPE_CODES[box.values.dtype], list(box.shape), list(box.offset), list(box.values.shape)]
        for part, named in boxes.items()
        for name, box in named.items()
    ]


def divide(told: Sequence[list[list[Any]]], own_rank: int) -> Plan:
    """A rank's plan from every rank's entries. Boxes of a tensor are alike or apart, as axes copy it or cut it."""
    table: dict[str, dict[str, TensorRecord]] = {}
    holders: dict[tuple[str, str, Extent], list[int]] = {}
    sizes: dict[tuple[str, str, Extent], int] = {}
    for rank, boxes in enumerate(told):
        for part, name, code, whole, offset, shape in boxes:
            table.setdefault(part, {})[name] = TensorRecord(dtype=code, shape=whole)
            if 0 not in shape:
                key = (part, name, Extent(tuple(offset), tuple(shape)))
                holders.setdefault(key, []).append(rank)
                sizes[key] = byte_count(shape, DTYPES[code])
    load = [0] * len(told)
    share = []
    for key in sorted(holders, key=lambda key: -sizes[key]):  # stable, so the same on every rank
        rank = min(holders[key], key=lambda rank: load[rank])
        load[rank] += sizes[key]
        if rank == own_rank:
            share.append(key[:2])
    return Plan(table, share)
