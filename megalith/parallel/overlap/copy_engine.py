"""Collectives by the GPUs' copy engines, between GPUs of one host that reach each other's memory over NVLink.

NCCL's kernels take SMs from the matmuls that they overlap: 20 all-gathers of 7.1 ms beside matmuls of 5.8 ms take
10.1 ms on two H200, and by copy engines 6.2 (benchmarks/RESULTS.md). Here a rank copies its input into symmetric
memory, which all ranks of the group can read; the ranks signal each other with flags (cuda_driver.py), and each
fetches its share by copies. None of that takes an SM. A kernel that synchronizes ranks would wait for the matmul that
began before it, 0.2 ms in GPT-2-large.

Each function begins a collective on its own stream and returns a tensor that `torch.ops._c10d_functional.wait_tensor`
completes, as torch's functional collectives do, so compiled code traces them. All ranks of a group call the same
functions with the same shapes in the same order. Kernels launched afterwards may free or overwrite the input. Raises
TrainingError if the GPUs of a group cannot reach each other's memory.
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

from megalith.errors import TrainingError
from megalith.parallel.overlap.cuda_driver import Flags, copy

SLOTS = 4  # collectives of a group under way before the next one waits for the memory of the first
FLAG = 64  # bytes from one flag to the next, which is written by another GPU
MOST_RANKS = 72  # that NVLink joins


_library = Library("megalith_copy_engine", "DEF")


def operator(schema: str, fake: Callable) -> Callable[[Callable], Callable]:
    """Makes a function an operator of compiled code, which hands over tensors and views as they are, with what `fake`
    gives for its shapes.

    torch.library.custom_op would do, and take three times as long for each call.
    """

    def define(function: Callable) -> Callable:
        name = schema.partition("(")[0]
        _library.define(schema, tags=(torch.Tag.needs_exact_strides,))
        _library.impl(name, function, "CompositeExplicitAutograd")
        register_fake(f"megalith_copy_engine::{name}", fake, lib=_library)
        return function

    return define


def _gathered(x: Tensor, size: int, group: str) -> Tensor:
    return x.new_empty(size * x.shape[0], *x.shape[1:])


def _others(x: Tensor, size: int, group: str) -> Tensor:
    return x.new_empty(size - 1, x.shape[0] // size, *x.shape[1:])


@operator("all_gather(Tensor x, int size, str group) -> Tensor", _gathered)
def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """The ranks' contiguous x, one after the other along dimension 0, on all of the `size` ranks of `group`."""
    out, part = _gathered(x, size, group), x.nbytes

    def give(slot: Slot, stream: int) -> None:
        copy(x.data_ptr(), slot.addresses[slot.rank], part, stream)

    def fetch(slot: Slot, stream: int) -> None:
        target = out.data_ptr()
        for rank in (slot.rank, *slot.peers):
            copy(slot.addresses[rank], target + rank * part, part, stream)

    return exchange(out, part, group, give, fetch)


@operator("scatter(Tensor x, int size, str group) -> Tensor", _others)
def scatter(x: Tensor, size: int, group: str) -> Tensor:
    """Part j of the contiguous x, along dimension 0, goes to rank j: what came, [size - 1, rows / size, ...], nearest
    rank behind this one first. With the own part it is what a reduce-scatter sums up (collectives.py)."""
    out, whole = _others(x, size, group), x.nbytes
    part = whole // size

    def give(slot: Slot, stream: int) -> None:
        source, target = x.data_ptr(), slot.addresses[slot.rank]
        before, behind = slot.rank * part, (slot.rank + 1) * part  # the own part stays
        if before > 0:
            copy(source, target, before, stream)
        if behind < whole:
            copy(source + behind, target + behind, whole - behind, stream)

    def fetch(slot: Slot, stream: int) -> None:
        target = out.data_ptr()
        for place, peer in enumerate(slot.peers):
            copy(slot.addresses[peer] + slot.rank * part, target + place * part, part, stream)

    return exchange(out, whole, group, give, fetch)


class Slot:
    """Symmetric memory for a rank's input, which its peers can read, and flags for their progress.

    Each use of a slot is a turn. After the memory every rank has two flags for each peer: the last turn for which that
    one has filled its slot, and the last in which it has fetched this one.
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
        self.peers = tuple((self.rank + step) % self.ranks for step in range(1, self.ranks))
        """The other ranks in the order in which this one fetches: each begins at another."""
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], Tensor] = {}
        whole = self._memory.shape, self._memory.dtype
        self.addresses = [self.of(rank, *whole).data_ptr() for rank in range(self.ranks)]
        """Where on this GPU stands what each rank gives."""
        self._turns = 0
        self._read = torch.cuda.Event()  # by this rank itself
        self._given = torch.cuda.Event()

        def given(at: int, by: int) -> int:
            """The address of the flag on rank `at` for what rank `by` has given."""
            return self.addresses[at] + flags + FLAG * by

        def fetched(at: int, by: int) -> int:
            return given(at, MOST_RANKS + by)

        # A call of the driver for each step of a turn.
        here, peers = self.rank, self.peers
        self._before = Flags(awaited=[fetched(here, by) for by in peers])
        self._filled = Flags([given(at, here) for at in peers], [given(here, by) for by in peers])
        self._behind = Flags([fetched(at, here) for at in peers])

    def of(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What a rank gives as a tensor: always the same one."""
        key = rank, tuple(shape), dtype
        if key not in self._views:
            self._views[key] = self._handle.get_buffer(rank, shape, dtype)
        return self._views[key]

    def begin(self, stream: torch.cuda.Stream) -> None:
        """The next turn: the stream goes on when all, this rank too, have read what the slot held."""
        self._read.wait(stream)
        self._before(self._turns, stream.cuda_stream)

    def follow(self, giver: torch.cuda.Stream, fetcher: torch.cuda.Stream) -> None:
        """One stream goes on when what stands in the other is done."""
        self._given.record(giver)  # waited for at once, so that one event serves every turn
        self._given.wait(fetcher)

    def synchronize(self, stream: torch.cuda.Stream) -> None:
        """What the slot holds is given, by what stands before in the stream; it goes on when all have given theirs."""
        self._turns += 1
        self._filled(self._turns, stream.cuda_stream)

    def end(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """What all have given is read, by what stands before in the stream; the event comes after it."""
        self._behind(self._turns, stream.cuda_stream)
        self._read = stream.record_event()
        return self._read


class _Slots:
    """SLOTS slots of a group, which take turns, as large as its largest collective so far."""

    def __init__(self, group: str):
        self._group, self._size = group, 0

    def next(self, size: int) -> Slot:
        if size > self._size:
            torch.cuda.synchronize()  # nobody reads the old ones any more when all have come to make the new ones
            torch.cuda.empty_cache()  # memory for others comes from the driver, and not from what PyTorch keeps free
            self._size = size
            self._slots = cycle([Slot(size, self._group) for _ in range(SLOTS)])
        return next(self._slots)


slots = cache(_Slots)  # by the name of the group


@cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def _current_stream(device: int) -> torch.cuda.Stream:
    """As torch.cuda.current_stream, which makes a new object each time: that takes the host longer than a launch."""
    return _stream_of(device, torch._C._cuda_getCurrentRawStream(device))


@cache
def _stream_of(device: int, handle: int) -> torch.cuda.Stream:
    """The current stream, which has this handle."""
    return torch.cuda.current_stream(device)


class _Begun(Work):
    """What wait_tensor waits for: an event on a GPU."""

    def __init__(self, done: torch.cuda.Event, device: int):
        super().__init__()
        self._done, self._device = done, device

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._done.wait(_current_stream(self._device))
        return True


Part = Callable[[Slot, int], object]


def exchange(out: Tensor, size: int, group: str, give: Part, fetch: Part) -> Tensor:
    """Begins a collective that makes `out` whole.

    `give` puts at most `size` bytes, as many on every rank, into this rank's slot, on the current stream, and `fetch`
    makes `out` of the slots of all, on the stream of such collectives. Both are given the handle of their stream;
    the second is not the current one.
    """
    slot, device = slots(group).next(size), out.device.index
    here, stream = _current_stream(device), _stream(device)
    slot.begin(here)
    give(slot, here.cuda_stream)
    slot.follow(here, stream)
    slot.synchronize(stream)
    fetch(slot, stream.cuda_stream)
    torch._C._distributed_c10d._register_work(out, _Begun(slot.end(stream), device))
    return out
