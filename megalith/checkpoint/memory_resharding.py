"""Reshards in-memory snapshots after the number of ranks has changed.

Each rank assembles its new shards from old ones.

Shards are boxes in global tensors (extent.py). Ranks exchange lists of the boxes that they hold and need, so that each
rank knows which values to send. A rank uses the values that it holds itself, and receives every other value from one
rank that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.checkpoint.extent import Extent
from megalith.checkpoint.files import byte_view
from megalith.checkpoint.state import OPTIMIZER
from megalith.comm.collectives import Axis, gather_json
from megalith.optim.moments import Moment
from megalith.parallel.shards import LocalShard

MAX_MESSAGE = 2**28  # bytes

Shards = Mapping[str, Mapping[str, LocalShard]]  # by part and name
Stored = tuple[Sequence[Any], Sequence[Tensor]]  # entries of `Placed`, and the buffers with their bytes


class Placed(NamedTuple):
    """A tensor of a snapshot, with its place in a global tensor."""

    part: str
    name: str
    values: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the global tensor."""

    def entry(self) -> list[Any]:
        """Return everything but the values, as JSON."""
        values = self.values
        place = [list(values.shape), list(self.offset), list(self.shape)]
        return [self.part, self.name, str(values.dtype), *place]


def placed_tensors(shards: Shards) -> list[Placed]:
    """Return the tensors of a state, the optimizer's tensors last.

    A moment with reduced precision has several tensors.
    """
    tensors = []
    for part in sorted(shards, key=lambda part: part == OPTIMIZER):
        for name, shard in shards[part].items():
            if isinstance(shard.values, Moment):
                tensors += _placed_moment(part, name, shard)
            else:
                tensors.append(Placed(part, name, shard.values, tuple(shard.offset), tuple(shard.shape)))
    return tensors


def _placed_moment(part: str, name: str, shard: LocalShard) -> Iterator[Placed]:
    """Yield the quantized values of a moment, in the parameter's shape, and its scales, one per block of a row."""
    offset, shape = tuple(shard.offset), tuple(shard.shape)
    for number, tensor in enumerate(shard.values.tensors):
        block = shard.values.shape[-1] // max(1, tensor.shape[-1])
        place = (*offset[:-1], offset[-1] // block), (*shape[:-1], shape[-1] // block)
        yield Placed(part, f"{name}.{number}", tensor, *place)


class _Source(NamedTuple):
    """A box of a global tensor in a rank's memory."""

    rank: int
    snapshot: int
    tensor: int


class _Piece(NamedTuple):
    """Part of a needed box, and the box that contains it."""

    source: _Source
    whole: Extent
    part: Extent
    needed: int
    """Index of the tensor that needs this piece."""


def reshard(snapshots: Sequence[Stored], shards: Shards, world: Axis) -> list[Tensor] | None:
    """Return the bytes of this rank's tensors, one buffer for each. Collective.

    Args:
        snapshots: the snapshots that this rank has, of any old ranks.
        shards: the tensors that this rank needs.
        world: all ranks.

    Returns:
        The buffers. None on every rank if the snapshots have other tensors or lack some of the values.
    """
    tensors = placed_tensors(shards)
    entries = [[entries for entries, _ in snapshots], [placed.entry() for placed in tensors]]
    everyone = gather_json(entries, world)
    sources = _sources([snapshots for snapshots, _ in everyone])
    plans = [_plan(rank, needed, sources) for rank, (_, needed) in enumerate(everyone)]
    if any(plan is None for plan in plans):
        return None
    values = [torch.empty(placed.values.shape, dtype=placed.values.dtype) for placed in tensors]
    at = [Extent(placed.offset, tuple(placed.values.shape)) for placed in tensors]
    for shift in range(world.size):
        receiver, sender = (world.rank + shift) % world.size, (world.rank - shift) % world.size
        sent = [_read(snapshots, piece) for piece in plans[receiver] if piece.source.rank == world.rank]
        pieces = [piece for piece in plans[world.rank] if piece.source.rank == sender]
        received = _transfer(sent, pieces, values, receiver, sender, world) if shift else sent
        for piece, data in zip(pieces, received):
            values[piece.needed][piece.part.slices(at[piece.needed])] = data
    return [byte_view(tensor) for tensor in values]


def _sources(by_rank: Sequence[Sequence[Sequence[Any]]]) -> dict[tuple, dict[Extent, list[_Source]]]:
    """Return the boxes in all ranks' memory, keyed by checkpoint part, name, dtype and global shape."""
    sources: dict[tuple, dict[Extent, list[_Source]]] = {}
    for rank, snapshots in enumerate(by_rank):
        for number, entries in enumerate(snapshots):
            for index, (part, name, dtype, size, offset, shape) in enumerate(entries):
                boxes = sources.setdefault((part, name, dtype, tuple(shape)), {})
                boxes.setdefault(Extent(tuple(offset), tuple(size)), []).append(_Source(rank, number, index))
    return sources


def _plan(
    rank: int, needed: Sequence[Sequence[Any]], sources: Mapping[tuple, Mapping[Extent, Sequence[_Source]]]
) -> list[_Piece] | None:
    """Return the pieces of boxes that a rank needs, or None if some are missing."""
    pieces = []
    for index, (part, name, dtype, size, offset, shape) in enumerate(needed):
        box, volume = Extent(tuple(offset), tuple(size)), 0
        for whole, holders in sources.get((part, name, dtype, tuple(shape)), {}).items():
            common = whole.intersection(box)
            if common is None:
                continue
            local = [source for source in holders if source.rank == rank]
            pieces.append(
                _Piece((local or holders)[0 if local else rank % len(holders)], whole, common, index)
            )
            volume += common.volume
        if volume != box.volume:
            return None
    return pieces


def _read(snapshots: Sequence[Stored], piece: _Piece) -> Tensor:
    """Return a piece of a tensor from this rank's snapshot."""
    entries, buffers = snapshots[piece.source.snapshot]
    sizes = [math.prod(size) * _dtype(dtype).itemsize for _, _, dtype, size, *_ in entries]
    start = sum(sizes[: piece.source.tensor])
    data, end, base = [], start + sizes[piece.source.tensor], 0
    for buffer in buffers:
        data.append(buffer[max(0, start - base) : max(0, end - base)])
        base += buffer.numel()
    tensor = torch.cat(data).view(_dtype(entries[piece.source.tensor][2])).view(piece.whole.shape)
    return tensor[piece.part.slices(piece.whole)]


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name.removeprefix("torch."))


def _transfer(
    sent: Sequence[Tensor],
    pieces: Sequence[_Piece],
    values: Sequence[Tensor],
    receiver: int,
    sender: int,
    world: Axis,
) -> list[Tensor]:
    """Send pieces to one rank, and return the pieces that another rank sends to this one."""
    received = [torch.empty(piece.part.shape, dtype=values[piece.needed].dtype) for piece in pieces]
    works = []
    for tensors, exchange, peer in ((sent, dist.isend, receiver), (received, dist.irecv, sender)):
        for tensor in tensors:
            for part in byte_view(tensor.contiguous()).split(MAX_MESSAGE):
                works.append(exchange(part, peer, group=world.group))
    for work in works:
        work.wait()
    return received
