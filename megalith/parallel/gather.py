"""Gathers global tensors on rank 0, one at a time, from the shards of all ranks.

Used to inspect or export full tensors. Rank 0 needs memory for one global tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.comm.collectives import Axis, gather_json
from megalith.parallel.shards import LocalShard

ALONE = Axis()  # the world of one process


@dataclass(frozen=True)
class OwnedShard:
    """A shard of a global tensor, the rank that owns it, and its device type (optimizer state may be on the host)."""

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    device_type: str


@dataclass
class GlobalTensor:
    """A tensor that is sharded over all ranks. A rank may hold no shard of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    world: Axis
    shard: LocalShard | None = None
    """The part that this rank sends. Values of a quantized weight are decoded when they are read."""
    parts: list[OwnedShard] = field(default_factory=list)

    def gather(self, device: torch.device | str = "cpu") -> Tensor | None:
        """Return the full tensor on rank 0, on `device`, and None elsewhere.

        Collective over all ranks, for the same tensors in the same order.
        """
        full = torch.empty(self.shape, dtype=self.dtype, device=device) if self.world.rank == 0 else None
        for part in self.parts:
            if full is not None:
                index = tuple(slice(at, at + size) for at, size in zip(part.offset, part.shape))
                full[index] = self.shard.values if part.rank == 0 else self._receive(part)
            elif part.rank == self.world.rank:
                dist.send(self.shard.values.contiguous(), dst=0, group=self.world.group)
        return full

    def _receive(self, part: OwnedShard) -> Tensor:
        tensor = torch.empty(part.shape, dtype=self.dtype, device=part.device_type)
        dist.recv(tensor, src=part.rank, group=self.world.group)
        return tensor


def global_tensors(shards: Mapping[str, LocalShard], world: Axis) -> dict[str, GlobalTensor]:
    """Return all tensors of the world by name, in the same order on every rank. Collective.

    If several ranks own the same shard, such as that of a tied embedding on two stages, the lowest rank sends it.
    """
    owned = []
    for name, shard in shards.items():
        if shard.owned:
            values = shard.values
            dtype = str(values.dtype).removeprefix("torch.")
            owned.append([name, dtype, shard.shape, shard.offset, values.shape, values.device.type])
    tensors: dict[str, GlobalTensor] = {}
    seen: set[tuple] = set()
    for rank, table in enumerate(gather_json(owned, world)):
        for name, dtype, global_shape, offset, shape, device_type in table:
            offset, shape = tuple(offset), tuple(shape)
            tensor = tensors.setdefault(name, GlobalTensor(getattr(torch, dtype), tuple(global_shape), world))
            if 0 in shape or (name, offset) in seen:
                continue
            seen.add((name, offset))
            tensor.parts.append(OwnedShard(rank, offset, shape, device_type))
            if rank == world.rank:
                tensor.shard = shards[name]
    return tensors
