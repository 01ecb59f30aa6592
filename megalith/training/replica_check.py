"""Check that replicas of weights are bitwise identical.

Parameters are replicated over data parallelism without sharding, between the replicas of hybrid sharding, over tensor
parallelism (norms), and on the first and last pipeline stage (tied embeddings). Replicas receive the same gradients and
make the same updates, so a difference means a fault in a rank's memory or arithmetic, which the loss would not show for
a long time. Each rank computes two integers from each parameter's bits, and the ranks compare them. Checkpoints store
each parameter once, so a resumed run starts with identical replicas.
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

BLOCK = 2**22  # elements converted to integers at a time
MAX_NAMES = 3  # parameters named in the message


class ReplicaCheck:
    """Compares replicated parameters. Every rank must build it, at a time when no layer is gathered."""

    def __init__(self, chunks: Sequence[Transformer], parameters: LocalParameters, mesh: Mesh):
        self._world, self._shards = mesh.world, parameters.shards  # live: store_frozen changes it
        self._replicated: dict[str, tuple[Axis, list[str]]] = {}  # parameter names by replica group
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                axes = _copies(parameter)
                if name in parameters.copies:
                    axes.append(parameters.copies[name])
                for axis in axes:
                    self._replicated.setdefault(axis.name, (axis, []))[1].append(name)
        # Axes between stages come last, so that all ranks of a stage use their axes in the same order.
        for name, axis in shared_parameters(chunks, mesh).items():
            self._replicated.setdefault(f"stages {axis.name}", (axis, []))[1].append(name)
        self.last_identical_step: int | None = None
        """Last step at which all replicas were identical."""

    @torch.no_grad()
    def check(self, step: int) -> None:
        """Raise TrainingError on every rank if replicas differ. Waits for the device."""
        local = []
        for axis, names in self._replicated.values():
            local += _differing(axis, [(name, self._shards[name].values) for name in names])
        reports = [item for rank in gather_json(local, self._world) for item in rank]
        differences = sorted(
            {(name, tuple(differing), tuple(holders)) for name, differing, holders in reports}
        )
        if differences:
            raise TrainingError(self._message(step, differences))
        self.last_identical_step = step

    def _message(self, step: int, differences: list[tuple[str, tuple[int, ...], tuple[int, ...]]]) -> str:
        names = ", ".join(sorted({name for name, _, _ in differences})[:MAX_NAMES])
        ranks = Counter(rank for _, differing, _ in differences for rank in differing)
        _, differing, holders = differences[0]
        if len(differing) < len(holders) / 2:
            minority = ", ".join(str(rank) for rank in sorted(ranks))
            who = f"the weights of rank {minority} differ from its replicas"
        else:
            who = (
                f"the weights of ranks {', '.join(map(str, holders))} differ, without a majority that agrees"
            )
        since = f"step {self.last_identical_step}" if self.last_identical_step is not None else "its start"
        return (
            f"after step {step} {who} ({names}; {len({name for name, _, _ in differences})} parameters in all): a "
            f"fault in a rank's memory or arithmetic. Remove its device from the job and resume from a checkpoint; the "
            f"replicas were identical at {since}"
        )


def digest(values: Tensor) -> Tensor:
    """Return two checksums of a tensor's bits, int64 [2]: their sum, and their sum weighted by position.

    The result stays on the device.
    """
    bits = values.reshape(-1).view(_INTEGERS[values.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=values.device)
    for start in range(0, bits.numel(), BLOCK):
        block = bits[start : start + BLOCK].to(torch.int64)
        weights = torch.arange(start + 1, start + 1 + block.numel(), device=values.device)
        total += torch.stack([block.sum(), (block * weights).sum()])
    return total


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _copies(parameter: Tensor) -> list[Axis]:
    """Return the axes over which a parameter is replicated, from its placements."""
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
    axis: Axis, shards: list[tuple[str, Tensor]]
) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Return the names of the parameters that differ between ranks.

    Each is a tuple (name, ranks that differ from the majority, all ranks that have it). Ranks are global.
    """
    local = torch.stack([digest(values) for _, values in shards])  # [parameters, 2]
    gathered = wait(begin_all_gather(local[None], axis)).tolist()  # [ranks, parameters, 2]
    holders = tuple(dist.get_process_group_ranks(axis.group))
    differences = []
    for number, (name, _) in enumerate(shards):
        digests = [tuple(rank[number]) for rank in gathered]
        [(usual, _)] = Counter(digests).most_common(1)
        differing = tuple(rank for rank, one in zip(holders, digests) if one != usual)
        if differing:
            differences.append((name, differing, holders))
    return differences
