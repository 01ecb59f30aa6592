"""Global tensors put together on rank 0, one at a time, from the shards that the ranks own.

For a look at whole tensors. Rank 0 needs memory for one global tensor.
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
    """A shard of a global tensor, the rank that gives it, and where it has it: optimizer state may be on the host."""

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    device_type: str


@dataclass
class GlobalTensor:
    """A tensor that is spread over the world, with or without a part on this rank."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    world: Axis
    own: Tensor | None = None
    parts: list[OwnedShard] = field(default_factory=list)

    def whole(self, device: torch.device | str = "cpu") -> Tensor | None:
        """The tensor on rank 0, on this device, None elsewhere. Every rank calls it, in the same order of tensors."""
        whole = torch.empty(self.shape, dtype=self.dtype, device=device) if self.world.rank == 0 else None
        for part in self.parts:
            if whole is not None:
                index = tuple(slice(at, at + size) for at, size in zip(part.offset, part.shape))
                whole[index] = self.own if part.rank == 0 else self._receive(part)
            elif part.rank == self.world.rank:
                dist.send(self.own.contiguous(), dst=0, group=self.world.group)
        return whole

    def _receive(self, part: OwnedShard) -> Tensor:
        tensor = torch.empty(part.shape, dtype=self.dtype, device=part.device_type)
        dist.recv(tensor, src=part.rank, group=self.world.group)
        return tensor


def global_tensors(shards: Mapping[str, LocalShard], world: Axis) -> dict[str, GlobalTensor]:
    """Every tensor that some rank of the world has a shard of, the same names in the same order on every rank.

    Every rank calls it. What several ranks own, such as a buffer or a tied embedding on two stages, the lowest gives.
    """
    own = []
    for name, shard in shards.items():
        if shard.owned:
            dtype = str(shard.values.dtype).removeprefix("torch.")
            own.append([name, dtype, shard.shape, shard.offset, shard.values.shape, shard.values.device.type])
    tensors: dict[str, GlobalTensor] = {}
    seen: set[tuple] = set()
    for rank, table in enumerate(gather_json(own, world)):
        for name, dtype, whole_shape, offset, shape, device_type in table:
            offset, shape = tuple(offset), tuple(shape)
            tensor = tensors.setdefault(name, GlobalTensor(getattr(torch, dtype), tuple(whole_shape), world))
            if 0 in shape or (name, offset) in seen:
                continue
            seen.add((name, offset))
            tensor.parts.append(OwnedShard(rank, offset, shape, device_type))
            if rank == world.rank:
                tensor.own = shards[name].values
    return tensors
