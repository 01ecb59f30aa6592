"""Collectives by the GPUs' copy engines, between GPUs of one host that reach each other's memory over NVLink.

NCCL's kernels take multiprocessors from the products that they run beside: 20 gathers of 7.1 ms beside products of
5.8 ms take 10.1 ms on two H200, and by copy engines 6.2 (benchmarks/RESULTS.md). Here a rank copies what it gives
into memory that all ranks of the group can read (symmetric memory), they tell each other by flags, and each fetches its
share by copies. None of that takes a multiprocessor: a kernel by which ranks meet would wait for the product that was
begun before it, 0.2 ms in GPT-2-large.

Each function begins a collective on a stream of its own and returns what `torch.ops._c10d_functional.wait_tensor` makes
whole, as torch's functional collectives do, so compiled code traces them. All ranks of a group call the same ones with
the same shapes in the same order. The input may be freed or overwritten by kernels that are launched afterwards.
Raises TrainingError where the GPUs of a group do not reach each other's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from itertools import cycle
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor
from torch.distributed.distributed_c10d import Work
from torch.library import Library, register_fake

from megalith.driver import await_flag, raise_flag
from megalith.errors import TrainingError

SLOTS = 4  # collectives of a group under way before the next one waits for the memory of the first
FLAG = 64  # bytes from one flag to the next, which is written by another GPU
MOST_RANKS = 72  # that NVLink joins


_library = Library("megalith_direct", "DEF")


def operator(schema: str, fake: Callable, tags: Sequence[torch.Tag] = ()) -> Callable[[Callable], Callable]:
    """Makes a function an operator of compiled code, with what `fake` gives for its shapes.

    torch.library.custom_op would do, and take three times as long for each call.
    """

    def define(function: Callable) -> Callable:
        name = schema.partition("(")[0]
        _library.define(schema, tags=tags)
        _library.impl(name, function, "CompositeExplicitAutograd")
        register_fake(f"megalith_direct::{name}", fake, lib=_library)
        return function

    return define


def _gathered(x: Tensor, size: int, group: str) -> Tensor:
    return x.new_empty(size * x.shape[0], *x.shape[1:])


def _others(x: Tensor, size: int, group: str) -> Tensor:
    return x.new_empty(size - 1, x.shape[0] // size, *x.shape[1:])


@operator("all_gather(Tensor x, int size, str group) -> Tensor", _gathered)
def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """The ranks' contiguous x, one behind the other along dimension 0, on all of the `size` ranks of `group`."""
    out = _gathered(x, size, group)
    parts = out.chunk(size)

    def fetch(slot: Slot, stream: torch.cuda.Stream) -> None:
        for peer in [slot.rank, *slot.peers()]:
            parts[peer].copy_(slot.of(peer, x))

    return exchange(out, x.nbytes, group, lambda slot: slot.of(slot.rank, x).copy_(x), fetch)


@operator("scatter(Tensor x, int size, str group) -> Tensor", _others)
def scatter(x: Tensor, size: int, group: str) -> Tensor:
    """Part j of the contiguous x, along dimension 0, goes to rank j: what came, [size - 1, rows / size, ...], nearest
    rank behind this one first. With the own part it is what a reduce-scatter sums up (comm.py)."""
    out = _others(x, size, group)

    def give(slot: Slot) -> None:
        given, mine = slot.of(slot.rank, x).chunk(size), x.chunk(size)
        for peer in slot.peers():
            given[peer].copy_(mine[peer])

    def fetch(slot: Slot, stream: torch.cuda.Stream) -> None:
        for part, peer in zip(out, slot.peers(), strict=True):
            part.copy_(slot.of(peer, x).chunk(size)[slot.rank])

    return exchange(out, x.nbytes, group, give, fetch)


class Slot:
    """Memory for what a rank gives, which its peers can read, and flags by which they say how far they are.

    Each use of a slot is a turn. Behind the memory every rank has two flags for each other one: the last turn for
    which that one has given what is in its slot, and the last for which it has fetched what is in this one.
    """

    def __init__(self, size: int, group: str):
        """A collective call: `size` bytes on every rank."""
        here = torch.device("cuda", torch.cuda.current_device())
        flags = -(-size // FLAG) * FLAG
        try:
            self._memory = symmetric.empty(flags + 2 * FLAG * MOST_RANKS, dtype=torch.uint8, device=here)
            self._memory[flags:] = 0
            torch.cuda.synchronize()  # nobody writes before all have come to the next line
            self._handle: Any = symmetric.rendezvous(self._memory, group)
        except torch.OutOfMemoryError:
            raise  # the trainer tells what holds the memory
        except RuntimeError as error:
            raise TrainingError(
                f"{here} cannot share {size:,} bytes with the other ranks of its axis ({error}); "
                "parallel.symmetric_memory_groups needs GPUs of one host that NVLink joins, and that much memory "
                "beside PyTorch's own: leave the axis out of it"
            ) from error
        self.rank: int = self._handle.rank
        self.ranks: int = self._handle.world_size
        self._flags = [self.of(rank, self._memory).data_ptr() + flags for rank in range(self.ranks)]
        self._turn = 0
        self._read = torch.cuda.Event()  # by this rank itself

    def peers(self) -> list[int]:
        """The other ranks in the order in which this one fetches: each begins at another."""
        return [(self.rank + step) % self.ranks for step in range(1, self.ranks)]

    def of(self, rank: int, like: Tensor) -> Tensor:
        """What a rank gives, a tensor like this one."""
        return self._handle.get_buffer(rank, like.shape, like.dtype)

    def begin(self, stream: torch.cuda.Stream) -> None:
        """The next turn: the stream goes on when all, this rank too, have read what the slot held."""
        stream.wait_event(self._read)
        for peer in self.peers():
            await_flag(self._fetched(self.rank, peer), self._turn, stream.cuda_stream)
        self._turn += 1

    def meet(self, stream: torch.cuda.Stream) -> None:
        """What the slot holds is given, by what stands before in the stream; it goes on when all have given theirs."""
        for peer in self.peers():
            raise_flag(self._given(peer, self.rank), self._turn, stream.cuda_stream)
        for peer in self.peers():
            await_flag(self._given(self.rank, peer), self._turn, stream.cuda_stream)

    def end(self, stream: torch.cuda.Stream) -> None:
        """What all have given is read, by what stands before in the stream."""
        self._read.record(stream)
        for peer in self.peers():
            raise_flag(self._fetched(peer, self.rank), self._turn, stream.cuda_stream)

    def _given(self, at: int, by: int) -> int:
        """The address of the flag on rank `at` for what rank `by` has given."""
        return self._flags[at] + FLAG * by

    def _fetched(self, at: int, by: int) -> int:
        return self._flags[at] + FLAG * (MOST_RANKS + by)


class _Slots:
    """`count` slots of a group, which take turns, as large as its largest collective so far."""

    def __init__(self, group: str, count: int):
        self._group, self._count, self._size = group, count, 0

    def next(self, size: int) -> Slot:
        if size > self._size:
            torch.cuda.synchronize()  # nobody reads the old ones any more when all have met to make the new ones
            torch.cuda.empty_cache()  # memory for others comes from the driver, and not from what PyTorch keeps free
            self._size = size
            self._turns = cycle([Slot(size, self._group) for _ in range(self._count)])
        return next(self._turns)


slots = cache(_Slots)  # by the name of the group, and how many


@cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


class _Begun(Work):
    """What wait_tensor waits for: all that stands in the stream now."""

    def __init__(self, stream: torch.cuda.Stream):
        super().__init__()
        self._done = stream.record_event()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        torch.cuda.current_stream().wait_event(self._done)
        return True


Give = Callable[[Slot], object]
Fetch = Callable[[Slot, torch.cuda.Stream], None]


def exchange(out: Tensor, size: int, group: str, give: Give, fetch: Fetch) -> Tensor:
    """Begins a collective that makes `out` whole.

    `give` puts at most `size` bytes, as many on every rank, into this rank's slot, on the current stream; `fetch`
    makes `out` of the slots of all, on the stream of such collectives, which it is given and which is the current one.
    """
    slot = slots(group, SLOTS).next(size)
    here, stream = torch.cuda.current_stream(), _stream(out.device.index)
    slot.begin(here)
    give(slot)
    stream.wait_stream(here)
    # A with-statement asks for the current stream again, which takes as long as a launch.
    torch.cuda.set_stream(stream)
    try:
        slot.meet(stream)
        fetch(slot, stream)
        slot.end(stream)
    finally:
        torch.cuda.set_stream(here)
    torch._C._distributed_c10d._register_work(out, _Begun(stream))
    return out
