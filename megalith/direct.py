"""Collectives by the GPUs' copy engines, between GPUs of one host that reach each other's memory over NVLink.

NCCL's kernels take multiprocessors from the products that they run beside: 20 gathers of 7.1 ms beside products of
5.8 ms take 10.1 ms on two H200, and by copy engines 6.2 (benchmarks/RESULTS.md). Here a rank copies what it gives
into memory that all ranks of the group can read (symmetric memory), they meet, and each fetches its share by copies
that take no multiprocessor.

Each function begins a collective on a stream of its own and returns what `torch.ops._c10d_functional.wait_tensor` makes
whole, as torch's functional collectives do, so compiled code traces them. All ranks of a group call the same ones with
the same shapes in the same order. The input may be freed or overwritten by kernels that are launched afterwards.
Raises TrainingError where the GPUs of a group do not reach each other's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import cycle
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor
from torch.library import custom_op

from megalith.errors import TrainingError

SLOTS = 4  # collectives of a group under way before the next one waits for the memory of the first


@custom_op("megalith_direct::all_gather", mutates_args=())
def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """The ranks' contiguous x, one behind the other along dimension 0, on all of the `size` ranks of `group`."""
    out = x.new_empty(size * x.shape[0], *x.shape[1:])

    def fetch(slot: Slot) -> None:
        for peer in [slot.rank, *slot.peers()]:
            out.chunk(size)[peer].copy_(slot.of(peer, x))

    return exchange(out, x.nbytes, group, lambda slot: slot.of(slot.rank, x).copy_(x), fetch)


@custom_op("megalith_direct::scatter", mutates_args=())
def scatter(x: Tensor, size: int, group: str) -> Tensor:
    """Part j of the contiguous x, along dimension 0, goes to rank j: what came, [size - 1, rows / size, ...], nearest
    rank behind this one first. With the own part it is what a reduce-scatter sums up (comm.py)."""
    out = x.new_empty(size - 1, x.shape[0] // size, *x.shape[1:])

    def give(slot: Slot) -> None:
        given, mine = slot.of(slot.rank, x).chunk(size), x.chunk(size)
        for peer in slot.peers():
            given[peer].copy_(mine[peer])

    def fetch(slot: Slot) -> None:
        for part, peer in zip(out, slot.peers(), strict=True):
            part.copy_(slot.of(peer, x).chunk(size)[slot.rank])

    return exchange(out, x.nbytes, group, give, fetch)


@all_gather.register_fake
def _(x: Tensor, size: int, group: str) -> Tensor:
    return x.new_empty(size * x.shape[0], *x.shape[1:])


@scatter.register_fake
def _(x: Tensor, size: int, group: str) -> Tensor:
    return x.new_empty(size - 1, x.shape[0] // size, *x.shape[1:])


class Slot:
    """Memory for what a rank gives, which its peers can read, and the moment from which it is free again."""

    def __init__(self, size: int, group: str):
        """A collective call: `size` bytes on every rank."""
        here = torch.device("cuda", torch.cuda.current_device())
        try:
            self._handle: Any = symmetric.rendezvous(
                symmetric.empty(size, dtype=torch.uint8, device=here), group
            )
        except RuntimeError as error:
            raise TrainingError(
                f"{here} cannot share {size:,} bytes with the other ranks of its axis ({error}); "
                "parallel.symmetric_memory_groups needs GPUs of one host that NVLink joins: leave the axis out of it"
            ) from error
        self.rank: int = self._handle.rank
        self.ranks: int = self._handle.world_size
        self._free = torch.cuda.Event()

    def peers(self) -> list[int]:
        """The other ranks in the order in which this one fetches: each begins at another."""
        return [(self.rank + step) % self.ranks for step in range(1, self.ranks)]

    def of(self, rank: int, like: Tensor) -> Tensor:
        """What a rank gives, a tensor like this one."""
        return self._handle.get_buffer(rank, like.shape, like.dtype)

    def meet(self) -> None:
        """On the current stream: goes on when all ranks have come so far."""
        self._handle.barrier()

    def set_free(self) -> None:
        """To be called when all have fetched what the slot held, as far as the current stream knows."""
        self._free.record()

    def wait_free(self) -> None:
        """On the current stream: goes on when the slot may be written again."""
        torch.cuda.current_stream().wait_event(self._free)


class _Slots:
    """`count` slots of a group, which take turns, as large as its largest collective so far."""

    def __init__(self, group: str, count: int):
        self._group, self._count, self._size = group, count, 0

    def next(self, size: int) -> Slot:
        if size > self._size:
            torch.cuda.synchronize()  # nobody reads the old ones any more when all have met to make the new ones
            self._size = size
            self._turns = cycle([Slot(size, self._group) for _ in range(self._count)])
        return next(self._turns)


slots = cache(_Slots)  # by the name of the group, and how many


@cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def exchange(
    out: Tensor, size: int, group: str, give: Callable[[Slot], object], fetch: Callable[[Slot], None]
) -> Tensor:
    """Begins a collective that makes `out` whole.

    `give` puts at most `size` bytes, as many on every rank, into this rank's slot, on the current stream; `fetch`
    makes `out` of the slots of all, on the stream of such collectives.
    """
    slot, stream = slots(group, SLOTS).next(size), _stream(out.device.index)
    slot.wait_free()
    give(slot)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        slot.meet()
        fetch(slot)
        slot.meet()
        slot.set_free()
        torch._C._distributed_c10d._register_work(out, symmetric.Work())
    return out
