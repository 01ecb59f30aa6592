"""Assigns each sharded matrix to one of the ranks that hold its shards; that rank collects the whole matrix.

An operation on whole matrices, such as Muon's orthogonalization, then runs once per matrix instead of once per rank:

    collection = CollectedMatrices(matrices, shards, costs)   all-to-all: shards to their matrices' owners
    wholes = collection.wait()                         this rank's matrices, by position
    shards = collection.scatter(results)               all-to-all: back to the shards

If several mesh axes shard a matrix, there is one all-to-all per axis, in the opposite order of the sharding. Each
divides the matrices over its ranks, so that all ranks together own each matrix once. Owners are chosen by cost, the
most expensive matrices first, identically on every rank. Experts stay on their ranks: the first of three dimensions is
never collected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class _Cut:
    """A split of one dimension of a tensor over a mesh axis."""

    axis: int
    dim: int
    size: int

    def sizes(self, ranks: int) -> list[int]:
        part = -(-self.size // ranks)
        return [max(min(part, self.size - rank * part), 0) for rank in range(ranks)]


@dataclass(frozen=True)
class SharedMatrix:
    """A parameter that is sharded over several ranks, one of which can collect the whole matrix."""

    mesh: DeviceMesh
    cuts: list[_Cut]
    """The cuts of the parameter, the last one first."""
    columns: int
    """Dimension of the columns."""

    @classmethod
    def of(cls, like: DTensor) -> SharedMatrix:
        """Return the sharding of the DTensor `like`."""
        mesh, shape, shared = like.device_mesh, list(like.shape), []
        cuts = [
            (hasattr(place, "split_factor"), axis, place.dim)
            for axis, place in enumerate(like.placements)
            if hasattr(place, "dim")
        ]
        for _, axis, dim in sorted(cuts):  # the order of local_shape_and_offset
            ranks = mesh.size(axis)
            stays = len(shape) == 3 and dim == 0
            cut = _Cut(axis, dim, shape[dim])
            shape[dim] = cut.sizes(ranks)[mesh.get_coordinate()[axis]]
            if ranks > 1 and not stays:
                shared.insert(0, cut)
        return cls(mesh, shared, len(shape) - 1)

    @property
    def key(self) -> tuple:
        """Value that must be equal for matrices to be collected together."""
        return (self.mesh, *(cut.axis for cut in self.cuts))

    @property
    def ranks(self) -> int:
        """Number of ranks that hold different shards."""
        return math.prod(self.mesh.size(cut.axis) for cut in self.cuts)

    @property
    def row_copies(self) -> int:
        """Number of ranks that hold the same rows, each with different columns."""
        return math.prod(self.mesh.size(cut.axis) for cut in self.cuts if cut.dim == self.columns)

    def of_rows(self) -> SharedMatrix:
        """Return the sharding of a tensor with values per row, such as NorMuon's second moments. It is treated as a
        matrix with one column per rank that shards the columns.

        Every rank has one column [..., rows, 1]; the columns are equal.
        """
        cuts, columns = [], self.row_copies
        for cut in reversed(self.cuts):
            if cut.dim == self.columns:
                cuts.insert(0, replace(cut, size=columns))
                columns //= self.mesh.size(cut.axis)
            else:
                cuts.insert(0, cut)
        return replace(self, cuts=cuts)


def owned_matrices(matrices: Sequence[SharedMatrix], costs: Sequence[float]) -> list[int]:
    """Return the positions of those `matrices` that this rank owns if they are collected together."""
    positions = list(range(len(matrices)))
    for cut in matrices[0].cuts if matrices else ():
        ranks, rank = matrices[0].mesh.size(cut.axis), matrices[0].mesh.get_coordinate()[cut.axis]
        owners = assign([costs[at] for at in positions], ranks)
        positions = [at for at, owner in zip(positions, owners, strict=True) if owner == rank]
    return positions


class CollectedMatrices:
    """Collects full matrices on the ranks that own them (`wait`), and sends results back as shards (`scatter`). Every
    rank of the axes makes the same calls.
    """

    def __init__(self, matrices: Sequence[SharedMatrix], shards: Sequence[Tensor], costs: Sequence[float]):
        """Start the first all-to-all. All `matrices` have the same `key`; `costs` decide the owners."""
        self._matrices, self._costs = matrices, costs
        self._tensors = dict(enumerate(shards))
        self._dtype, self._device = shards[0].dtype, shards[0].device
        self._owners: list[dict[int, int]] = []
        self._before: list[dict[int, torch.Size]] = []
        """Shapes of the shards before each all-to-all, by position."""
        self._axes = [cut.axis for cut in matrices[0].cuts]
        self._mesh = matrices[0].mesh
        self._begin()

    def wait(self) -> dict[int, Tensor]:
        """Return this rank's whole matrices, by position in `matrices`."""
        for level in range(len(self._axes)):
            if level:
                self._begin()
            self._finish()
        return self._tensors

    def scatter(self, wholes: Mapping[int, Tensor]) -> list[Tensor]:
        """Send results back from the owners, and return this rank's shard of each, float32.

        Args:
            wholes: results of the matrices that this rank owns, by position, each of its matrix's shape.

        Returns:
            Shards in the order of `matrices`.
        """
        tensors = dict(wholes)
        for level in reversed(range(len(self._axes))):
            tensors = self._return(level, tensors)
        return [tensors[position] for position in range(len(self._matrices))]

    def _begin(self) -> None:
        level = len(self._owners)
        ranks, rank = self._place(level)
        positions = list(self._tensors)
        owners = dict(zip(positions, assign([self._costs[at] for at in positions], ranks), strict=True))
        self._owners.append(owners)
        self._before.append({at: self._tensors[at].shape for at in positions})
        order = [at for owner in range(ranks) for at in positions if owners[at] == owner]
        sent = [
            sum(self._tensors[at].numel() for at in order if owners[at] == owner) for owner in range(ranks)
        ]
        self._shapes = {
            at: [_with_size(self._tensors[at].shape, cut.dim, size) for size in cut.sizes(ranks)]
            for at in positions
            if owners[at] == rank
            for cut in (self._matrices[at].cuts[level],)
        }
        received = [
            sum(shapes[source].numel() for shapes in self._shapes.values()) for source in range(ranks)
        ]
        buffer = self._joined([self._tensors[at] for at in order], self._dtype)
        self._buffer = torch.empty(sum(received), dtype=self._dtype, device=self._device)
        self._work = dist.all_to_all_single(
            self._buffer, buffer, received, sent, group=self._mesh.get_group(self._axes[level]), async_op=True
        )
        self._sent = buffer  # stays until it has been sent

    def _finish(self) -> None:
        level = len(self._owners) - 1
        ranks, _ = self._place(level)
        self._work.wait()
        sizes = [shapes[source].numel() for source in range(ranks) for shapes in self._shapes.values()]
        parts = iter(self._buffer.split(sizes))
        pieces: dict[int, list[Tensor]] = {at: [] for at in self._shapes}
        for source in range(ranks):
            for at, shapes in self._shapes.items():
                pieces[at].append(next(parts).view(shapes[source]))
        self._tensors = {
            at: torch.cat(each, dim=self._matrices[at].cuts[level].dim) for at, each in pieces.items()
        }
        self._work = self._sent = self._buffer = None

    def _return(self, level: int, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        ranks, _ = self._place(level)
        owners = self._owners[level]
        cuts = {at: self._matrices[at].cuts[level] for at in owners}
        split = {
            at: tensors[at].split(cut.sizes(ranks), dim=cut.dim) for at, cut in cuts.items() if at in tensors
        }  # in the order in which the other ranks expect them
        pieces = [split[at][to] for to in range(ranks) for at in split]
        sent = [sum(parts[to].numel() for parts in split.values()) for to in range(ranks)]
        shapes = self._before[level]
        expected = [at for owner in range(ranks) for at in owners if owners[at] == owner]
        received = [
            sum(shapes[at].numel() for at in expected if owners[at] == owner) for owner in range(ranks)
        ]
        source = self._joined(pieces, torch.float32)
        buffer = torch.empty(sum(received), dtype=torch.float32, device=self._device)
        dist.all_to_all_single(buffer, source, received, sent, group=self._mesh.get_group(self._axes[level]))
        parts = buffer.split([shapes[at].numel() for at in expected])
        return {at: part.view(shapes[at]) for at, part in zip(expected, parts, strict=True)}

    def _joined(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        if not tensors:
            return torch.empty(0, dtype=dtype, device=self._device)
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    def _place(self, level: int) -> tuple[int, int]:
        axis = self._axes[level]
        return self._mesh.size(axis), self._mesh.get_coordinate()[axis]


def assign(costs: Sequence[float], ranks: int) -> list[int]:
    """Return a rank for each cost. Costs are assigned in descending order, each to the rank with the smallest total."""
    loads, owners = [0.0] * ranks, [0] * len(costs)
    for position in sorted(range(len(costs)), key=lambda at: -costs[at]):
        owner = loads.index(min(loads))
        owners[position], loads[owner] = owner, loads[owner] + costs[position]
    return owners


def _with_size(shape: torch.Size, dim: int, size: int) -> torch.Size:
    return torch.Size([*shape[:dim], size, *shape[dim + 1 :]])
