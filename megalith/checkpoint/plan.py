"""Plans a save so that each shard is written once and the bytes are balanced over the ranks.

Every rank sends rank 0 the list of its shards. Rank 0 makes the plan and sends each rank its share. A shard held by
several ranks (data parallelism without sharding, norms under tensor parallelism) goes to the rank with the fewest
bytes so far, beginning with the largest shards.

PyTorch's planner (torch.distributed.checkpoint) is not used. It plans over DTensors, but optimizer state is plain local
shards without padding rows, which no DTensor placement describes. It also pickles plans and metadata, between ranks and
in the checkpoint.
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
    """The tensors to store, and this rank's share of the writing."""

    table: Table
    """All parts. On rank 0, which writes the manifest, with the global tensors of all ranks. A part may be empty: SGD
    without momentum has no state."""

    share: list[Key]
    """Shards that this rank writes."""

    total_bytes: int
    """Bytes written by all ranks; known to each, so that all report the same if the disk is full."""


def make_plan(shards: StateShards, world: Axis) -> Plan:
    """Decide which rank writes which shard.

    Collective. Each rank passes its own shards and gets its share of the plan. Rank 0 also gets the table of all
    tensors.
    """
    table, shares = divide(gather_json(entries(shards), world, to_first=True))
    total = sum(
        byte_count(tensor.shape, DTYPES[tensor.dtype])
        for named in table.values()
        for tensor in named.values()
    )
    share, total = scatter_json([[share, total] for share in shares], world)
    return Plan({part: {} for part in shards} | table, [(part, name) for part, name in share], total)


def entries(shards: StateShards) -> list[list[Any]]:
    """Describe a rank's shards as JSON: checkpoint part, name, dtype, global shape, offset and shape of each shard."""
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


def divide(rank_entries: Sequence[list[list[Any]]]) -> tuple[Table, list[list[Key]]]:
    """Return all tensors and each rank's keys to write, from the `entries` of every rank.

    Shards of the same tensor are identical or disjoint.
    """
    table: Table = {}
    holders: dict[tuple, list[int]] = {}  # ranks by shard: part, name, offset and shape
    sizes: dict[tuple, int] = {}
    for rank, shards in enumerate(rank_entries):
        for part, name, code, global_shape, offset, shape in shards:
            named = table.setdefault(part, {})
            if name not in named:
                named[name] = TensorRecord(dtype=code, shape=global_shape)
            shard = (part, name, *offset, *shape)
            if shard in holders:
                holders[shard].append(rank)
            elif 0 not in shape:
                holders[shard], sizes[shard] = [rank], byte_count(shape, DTYPES[code])
    load = [0] * len(rank_entries)
    shares: list[list[Key]] = [[] for _ in rank_entries]
    for shard in sorted(holders, key=sizes.__getitem__, reverse=True):
        rank = min(holders[shard], key=load.__getitem__)
        load[rank] += sizes[shard]
        shares[rank].append(shard[:2])
    return table, shares
