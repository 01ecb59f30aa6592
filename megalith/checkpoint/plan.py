"""Who saves what: each piece of a run's state once, the bytes spread evenly over the ranks that hold copies.

Every rank tells rank 0 its boxes, which makes the plan from all of them and tells each its share. A box that several
ranks hold (under data parallelism without sharding, or a norm under tensor parallelism) goes to the one of them that
has least to write so far, the largest boxes first.

PyTorch's planner (torch.distributed.checkpoint) was weighed and left: it plans over DTensors, and our optimizer state
is plain local shards whose padding rows are cut off, each of which would have to be dressed as a DTensor with a
placement that does not exist; its plans and metadata are pickled between ranks and into the checkpoint; and what it
gives, this file has in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalith.checkpoint.files import DTYPE_CODES, DTYPES, byte_count
from megalith.checkpoint.manifest import TensorRecord
from megalith.comm.collectives import Axis, gather_json, scatter_json
from megalith.parallel.shards import Box

Boxes = Mapping[str, Mapping[str, Box]]  # by part and name
Table = dict[str, dict[str, TensorRecord]]  # by part and name
Key = tuple[str, str]  # part and name


@dataclass(frozen=True)
class Plan:
    """What is stored, and this rank's share of the writing."""

    table: Table
    """Every part, and on rank 0, which writes the manifest, the world's global tensors in it. A part may have none:
    SGD without momentum has no state."""

    share: list[Key]
    """The boxes that this rank writes."""

    total_bytes: int
    """What all ranks' shares take; every rank has it, for all tell the same where the disk is full."""


def make_plan(boxes: Boxes, world: Axis) -> Plan:
    """The plan for `boxes`, of which each rank of the world gives its own; every rank calls it."""
    table, shares = divide(gather_json(entries(boxes), world, to_first=True))
    total = sum(
        byte_count(tensor.shape, DTYPES[tensor.dtype])
        for named in table.values()
        for tensor in named.values()
    )
    share, total = scatter_json([[share, total] for share in shares], world)
    return Plan({part: {} for part in boxes} | table, [(part, name) for part, name in share], total)


def entries(boxes: Boxes) -> list[list[Any]]:
    """What a rank tells of its boxes, plain JSON: part, name, type, global shape, offset and shape of the box."""
    return [
        [part, name, DTYPE_CODES[box.values.dtype], list(box.shape), list(box.offset), list(box.values.shape)]
        for part, named in boxes.items()
        for name, box in named.items()
    ]


def divide(told: Sequence[list[list[Any]]]) -> tuple[Table, list[list[Key]]]:
    """Every tensor, and each rank's share, from what each rank has told.

    Boxes of a tensor are alike or apart, as axes copy it or cut it.
    """
    table: Table = {}
    holders: dict[tuple, list[int]] = {}  # of a box: part, name, offset and shape
    sizes: dict[tuple, int] = {}
    for rank, boxes in enumerate(told):
        for part, name, code, whole, offset, shape in boxes:
            named = table.setdefault(part, {})
            if name not in named:
                named[name] = TensorRecord(dtype=code, shape=whole)
            box = (part, name, *offset, *shape)
            if box in holders:
                holders[box].append(rank)
            elif 0 not in shape:
                holders[box], sizes[box] = [rank], byte_count(shape, DTYPES[code])
    load = [0] * len(told)
    shares: list[list[Key]] = [[] for _ in told]
    for box in sorted(holders, key=sizes.__getitem__, reverse=True):
        rank = min(holders[box], key=load.__getitem__)
        load[rank] += sizes[box]
        shares[rank].append(box[:2])
    return table, shares
