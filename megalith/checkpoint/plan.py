"""The plan of a save: each shard of a run's state is written once, with the bytes spread evenly over the ranks.

Every rank sends rank 0 the list of its shards. Rank 0 makes the plan and sends each rank its share. A shard that
several ranks hold (under data parallelism without sharding, or a norm under tensor parallelism) goes to the rank that
has the least to write so far, starting with the largest shards.

PyTorch's planner (torch.distributed.checkpoint) does not fit. It plans over DTensors, but the optimizer state is plain
local shards without their padding rows, and no DTensor placement describes those. It also pickles its plans and
metadata, between ranks and into the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalith.checkpoint.files import DTYPE_CODES, DTYPES, byte_count
from megalith.checkpoint.manifest import TensorRecord
from megalith.comm.collectives import Axis, gather_json, scatter_json
from megalith.parallel.shards import LocalShard

StateShards = Mapping[str, Mapping[str, LocalShard]]  # by part and name
Table = dict[str, dict[str, TensorRecord]]  # by part and name
Key = tuple[str, str]  # part and name


@dataclass(frozen=True)
class Plan:
    """What is stored, and this rank's share of the writing."""

    table: Table
    """Every part, and on rank 0, which writes the manifest, the world's global tensors in it. A part may have none:
    SGD without momentum has no state."""

    share: list[Key]
    """The shards that this rank writes."""

    total_bytes: int
    """What all ranks' shares take; every rank has it, for all tell the same where the disk is full."""


def make_plan(shards: StateShards, world: Axis) -> Plan:
    """The plan for `shards`, of which each rank of the world gives its own; every rank calls it."""
    table, shares = divide(gather_json(entries(shards), world, to_first=True))
    total = sum(
        byte_count(tensor.shape, DTYPES[tensor.dtype])
        for named in table.values()
        for tensor in named.values()
    )
    share, total = scatter_json([[share, total] for share in shares], world)
    return Plan({part: {} for part in shards} | table, [(part, name) for part, name in share], total)


def entries(shards: StateShards) -> list[list[Any]]:
    """What a rank tells of its shards, plain JSON: part, name, type, global shape, offset and shape of the shard."""
    return [
        [
            part,
            name,
            DTYPE_CODES[shard.values.dtype],
            *map(list, (shard.shape, shard.offset, shard.values.shape)),
        ]
        for part, named in shards.items()
        for name, shard in named.items()
    ]


def divide(told: Sequence[list[list[Any]]]) -> tuple[Table, list[list[Key]]]:
    """Every tensor, and each rank's share, from what each rank has told.

    Shards of a tensor are alike or apart, as axes copy it or cut it.
    """
    table: Table = {}
    holders: dict[tuple, list[int]] = {}  # of a shard: part, name, offset and shape
    sizes: dict[tuple, int] = {}
    for rank, shards in enumerate(told):
        for part, name, code, whole, offset, shape in shards:
            named = table.setdefault(part, {})
            if name not in named:
                named[name] = TensorRecord(dtype=code, shape=whole)
            shard = (part, name, *offset, *shape)
            if shard in holders:
                holders[shard].append(rank)
            elif 0 not in shape:
                holders[shard], sizes[shard] = [rank], byte_count(shape, DTYPES[code])
    load = [0] * len(told)
    shares: list[list[Key]] = [[] for _ in told]
    for shard in sorted(holders, key=sizes.__getitem__, reverse=True):
        rank = min(holders[shard], key=load.__getitem__)
        load[rank] += sizes[shard]
        shares[rank].append(shard[:2])
    return table, shares
