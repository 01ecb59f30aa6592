"""Replica check: weights that several ranks have must be bitwise the same on all of them.

Parameters are replicated over data parallelism without sharding or between the replicas of hybrid sharding, norms over
tensor parallelism, and a tied embedding on the first and the last pipeline stage. Replicas get the same reduced
gradients and make the same updates, so a difference means a fault in a rank's memory or arithmetic. A loss curve would
not show it for a long time. Each rank computes two integers from each parameter's bits, and the ranks compare them. A
checkpoint has each parameter once, so a resumed run starts with equal replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalith.comm.collectives import Axis, begin_all_gather, gather_json, wait
from megalith.errors import TrainingError
from megalith.models.transformer import Transformer
from megalith.parallel.mesh import Mesh
from megalith.parallel.pipeline.tied_parameters import shared_parameters
from megalith.parallel.shards import LocalParameters, dtensor_of

BLOCK = 2**22  # elements whose bits are held as integers at a time
NAMED = 3  # parameters in the message


class ReplicaCheck:
    """Compares the copies of parameters. Made by every rank, while no layer is gathered."""

    def __init__(self, chunks: Sequence[Transformer], parameters: LocalParameters, mesh: Mesh):
        self._world, self._shards = mesh.world, parameters.shards  # which store_frozen changes
        self._held: dict[str, tuple[Axis, list[str]]] = {}  # names, by the group of the copies
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                axes = _copies(parameter)
                if name in parameters.copies:
                    axes.append(parameters.copies[name])
                for axis in axes:
                    self._held.setdefault(axis.name, (axis, []))[1].append(name)
        # The axes between stages come last, so that every rank of a stage takes its axes in one order.
        for name, axis in shared_parameters(chunks, mesh).items():
            self._held.setdefault(f"stages {axis.name}", (axis, []))[1].append(name)
        self.agreed_at: int | None = None
        """The last step after which all copies were found the same."""

    @torch.no_grad()
    def check(self, step: int) -> None:
        """Raises TrainingError on every rank when copies differ somewhere. Waits for the device."""
        own = []
        for axis, names in self._held.values():
            own += _differing(axis, [(name, self._shards[name].values) for name in names])
        told = [item for rank in gather_json(own, self._world) for item in rank]
        found = sorted({(name, tuple(differing), tuple(holders)) for name, differing, holders in told})
        if found:
            raise TrainingError(self._tell(step, found))
        self.agreed_at = step

    def _tell(self, step: int, found: list[tuple[str, tuple[int, ...], tuple[int, ...]]]) -> str:
        names = ", ".join(sorted({name for name, _, _ in found})[:NAMED])
        ranks = Counter(rank for _, differing, _ in found for rank in differing)
        _, differing, holders = found[0]
        if len(differing) < len(holders) / 2:
            most = ", ".join(str(rank) for rank in sorted(ranks))
            who = f"rank {most} holds other weights than its replicas"
        else:
            who = f"ranks {', '.join(map(str, holders))} hold different weights, and no majority says which are right"
        since = f"step {self.agreed_at}" if self.agreed_at is not None else "its start"
        return (
            f"after step {step} {who} ({names}; {len({name for name, _, _ in found})} parameters in all): a fault of "
            f"a rank's memory or arithmetic. Take its device out of the job and go on from a checkpoint; the copies "
            f"were the same at {since}"
        )


def digest(values: Tensor) -> Tensor:
    """Two int64 numbers [2] of a tensor's bits: their sum, and their sum weighed by their places. On its device."""
    bits = values.reshape(-1).view(_INTEGERS[values.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=values.device)
    for start in range(0, bits.numel(), BLOCK):
        block = bits[start : start + BLOCK].to(torch.int64)
        places = torch.arange(start + 1, start + 1 + block.numel(), device=values.device)
        total += torch.stack([block.sum(), (block * places).sum()])
    return total


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _copies(parameter: Tensor) -> list[Axis]:
    """The axes along which a parameter's placements say that it stands on several ranks."""
    parameter = dtensor_of(parameter)
    if not isinstance(parameter, DTensor):
        return []
    mesh, axes = parameter.device_mesh, []
    for dim, placement in enumerate(parameter.placements):
        if placement.is_replicate() and mesh.size(dim) > 1:
            group = mesh.get_group(dim)
            axes.append(Axis(mesh.size(dim), mesh.get_local_rank(dim), group, group.group_name))
    return axes


def _differing(
    axis: Axis, held: list[tuple[str, Tensor]]
) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """(parameter, the ranks that differ from most, all its ranks), by ranks of the world; [] when all agree."""
    own = torch.stack([digest(values) for _, values in held])  # [parameters, 2]
    every = wait(begin_all_gather(own[None], axis)).tolist()  # [ranks, parameters, 2]
    holders = tuple(dist.get_process_group_ranks(axis.group))
    found = []
    for number, (name, _) in enumerate(held):
        digests = [tuple(rank[number]) for rank in every]
        [(usual, _)] = Counter(digests).most_common(1)
        differing = tuple(rank for rank, one in zip(holders, digests) if one != usual)
        if differing:
            found.append((name, differing, holders))
    return found
