"""Collectives by the GPUs' copy engines, between GPUs of one host that reach each other's memory over NVLink.

NCCL's kernels take SMs from the matmuls that they overlap: on two H200, 20 all-gathers (7.1 ms alone) and matmuls (5.8
ms alone) together take 10.1 ms with NCCL and 6.2 ms with copy engines (benchmarks/RESULTS.md). A rank copies its input
into symmetric memory, which all ranks of the group can read; the ranks signal each other with flags (cuda_driver.py),
and each copies what it needs. None of that takes an SM. A kernel that synchronizes ranks would wait for the matmul
started before it, 0.2 ms in GPT-2-large.

Each function starts a collective on a stream of its own and returns a tensor that
`torch.ops._c10d_functional.wait_tensor` completes, as torch's functional collectives do, so compiled code traces them.
All ranks of a group call the same functions with the same shapes in the same order. Kernels launched afterwards may
free or overwrite the input. Raises TrainingError if the GPUs of a group cannot reach each other's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work
from torch.library import Library, register_fake

from megalith.compat import symmetric_memory as symmetric
from megalith.errors import TrainingError
from megalith.parallel.overlap.cuda_driver import Flags, copy

SLOTS = 4  # concurrent collectives of a group; a further one waits for the memory of the first
FLAG = 64  # bytes between flags, which different GPUs write
MAX_RANKS = 72  # of an NVLink domain


_library = Library("megalith_copy_engine", "DEF")


def operator(schema: str, fake: Callable) -> Callable[[Callable], Callable]:
    """Register a function as an operator for compiled code, with `fake` as its shape function.

    Compiled code passes tensors and views unchanged. A call through torch.library.custom_op takes three times as long.
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


def _scattered(x: Tensor, size: int, group: str) -> Tensor:
    return x.new_empty(size - 1, x.shape[0] // size, *x.shape[1:])


@operator("all_gather(Tensor x, int size, str group) -> Tensor", _gathered)
def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """Start an all-gather of the contiguous x along dimension 0, over the `size` ranks of `group`."""
    out, part = _gathered(x, size, group), x.nbytes

    def fill(slot: Slot, stream: int) -> None:
        copy(x.data_ptr(), slot.addresses[slot.rank], part, stream)

    def fetch(slot: Slot, stream: int) -> None:
        target = out.data_ptr()
        for rank in (slot.rank, *slot.peers):
            copy(slot.addresses[rank], target + rank * part, part, stream)

    return exchange(out, part, group, fill, fetch)


@operator("scatter(Tensor x, int size, str group) -> Tensor", _scattered)
def scatter(x: Tensor, size: int, group: str) -> Tensor:
    """Start sending chunk j of the contiguous x, along dimension 0, to rank j, for every j.

    Returns the received chunks [size - 1, rows / size, ...], beginning with the next rank's. Their sum with the local
    part is a reduce-scatter (collectives.py).
    """
    out, total = _scattered(x, size, group), x.nbytes
    part = total // size

    def fill(slot: Slot, stream: int) -> None:
        source, target = x.data_ptr(), slot.addresses[slot.rank]
        before, after = slot.rank * part, (slot.rank + 1) * part  # the local part is not sent
        if before > 0:
            copy(source, target, before, stream)
        if after < total:
            copy(source + after, target + after, total - after, stream)

    def fetch(slot: Slot, stream: int) -> None:
        target = out.data_ptr()
        for index, peer in enumerate(slot.peers):
            copy(slot.addresses[peer] + slot.rank * part, target + index * part, part, stream)

    return exchange(out, total, group, fill, fetch)


class Slot:
    """Symmetric memory for a rank's input, which other ranks read, with flags for their progress.

    Uses of a slot are counted. After the memory, every rank has two flags per peer: the number of the last use for
    which the peer has filled its own slot, and of the last use in which the peer has read this rank's slot.
    """

    def __init__(self, size: int, group: str):
        """Allocate `size` bytes on every rank. Collective."""
        here = torch.device("cuda", torch.cuda.current_device())
        flags = -(-size // FLAG) * FLAG
        try:
            self._memory = symmetric.allocate(flags + 2 * FLAG * MAX_RANKS, here)
            self._memory[flags:] = 0
            torch.cuda.synchronize()  # no rank writes flags before the rendezvous
            self._handle: Any = symmetric.rendezvous(self._memory, group)
        except torch.OutOfMemoryError:
            raise  # the trainer reports what uses the memory
        except RuntimeError as error:
            raise TrainingError(
                f"{here} cannot share {size:,} bytes with the other ranks of its axis ({error}), but "
                "parallel.symmetric_memory_groups needs GPUs of one host connected by NVLink, and that much memory "
                "outside PyTorch's allocator; remove the axis from parallel.symmetric_memory_groups"
            ) from error
        self.rank: int = self._handle.rank
        self.ranks: int = self._handle.world_size
        self.peers = tuple((self.rank + step) % self.ranks for step in range(1, self.ranks))
        """The other ranks, in the order of this rank's reads. Each rank starts at a different peer."""
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], Tensor] = {}
        layout = self._memory.shape, self._memory.dtype
        self.addresses = [self.of(rank, *layout).data_ptr() for rank in range(self.ranks)]
        """Address of each rank's slot memory in this GPU's address space."""
        self._turns = 0
        self._read = torch.cuda.Event()  # this rank has read all slots
        self._handoff = torch.cuda.Event()

        def filled_flag(at: int, by: int) -> int:
            """Return the address of the flag on rank `at` that rank `by` sets when its slot is filled."""
            return self.addresses[at] + flags + FLAG * by

        def read_flag(at: int, by: int) -> int:
            return filled_flag(at, MAX_RANKS + by)

        # One driver call per step of a turn.
        here, peers = self.rank, self.peers
        self._free = Flags(awaited=[read_flag(here, by) for by in peers])
        self._filled = Flags([filled_flag(at, here) for at in peers], [filled_flag(here, by) for by in peers])
        self._done_reading = Flags([read_flag(at, here) for at in peers])

    def of(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a view of a rank's slot memory. The same arguments return the same tensor object."""
        key = rank, tuple(shape), dtype
        if key not in self._views:
            self._views[key] = self._handle.get_buffer(rank, shape, dtype)
        return self._views[key]

    def begin(self, stream: torch.cuda.Stream) -> None:
        """Make the stream wait until all ranks have read the previous collective's data from this slot."""
        self._read.wait(stream)
        self._free(self._turns, stream.cuda_stream)

    def follow(self, filling: torch.cuda.Stream, fetching: torch.cuda.Stream) -> None:
        """Make the stream `fetching` wait for the work queued on `filling`."""
        self._handoff.record(filling)  # waited for at once, so one event can serve every turn
        self._handoff.wait(fetching)

    def synchronize(self, stream: torch.cuda.Stream) -> None:
        """Queue a signal that this rank's slot is filled, after the work on the stream, and a wait until all ranks have
        filled their slots.
        """
        self._turns += 1
        self._filled(self._turns, stream.cuda_stream)

    def end(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Enqueue a signal, after the stream's work, that this rank has read all slots.

        Returns an event after that signal.
        """
        self._done_reading(self._turns, stream.cuda_stream)
        self._read = stream.record_event()
        return self._read


class _Slots:
    """The SLOTS slots of a group, used round-robin. They are as large as the group's largest collective so far."""

    def __init__(self, group: str):
        self._group, self._size = group, 0

    def next(self, size: int) -> Slot:
        if size > self._size:
            torch.cuda.synchronize()  # allocating the new slots is collective: no rank still reads the old ones then
            torch.cuda.empty_cache()  # symmetric memory comes from the driver, not from PyTorch's cache
            self._size = size
            self._slots = cycle([Slot(size, self._group) for _ in range(SLOTS)])
        return next(self._slots)


slots = cache(_Slots)  # by the name of the group


@cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def _current_stream(device: int) -> torch.cuda.Stream:
    """Return torch.cuda.current_stream(device) from a cache: creating the object takes longer than launching a
    kernel.
    """
    return _stream_of(device, symmetric.current_stream_handle(device))


@cache
def _stream_of(device: int, handle: int) -> torch.cuda.Stream:
    """Return the current stream. The result is cached by the stream's `handle`."""
    return torch.cuda.current_stream(device)


class _EventWork(Work):
    """A Work around a CUDA event, for wait_tensor to wait for."""

    def __init__(self, done: torch.cuda.Event, device: int):
        super().__init__()
        self._done, self._device = done, device

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._done.wait(_current_stream(self._device))
        return True


Part = Callable[[Slot, int], object]


def exchange(out: Tensor, size: int, group: str, fill: Part, fetch: Part) -> Tensor:
    """Start a collective that writes `out`, and register its Work.

    Args:
        out: tensor that receives the result.
        size: maximum bytes of a slot, the same on every rank.
        group: name of the process group.
        fill: fills this rank's slot; called as (slot, handle of the current stream).
        fetch: copies from all slots to `out`; called as (slot, handle of the stream on which the copies run), which is
            not the current one.
    """
    slot, device = slots(group).next(size), out.device.index
    here, stream = _current_stream(device), _stream(device)
    slot.begin(here)
    fill(slot, here.cuda_stream)
    slot.follow(here, stream)
    slot.synchronize(stream)
    fetch(slot, stream.cuda_stream)
    symmetric.register_work(out, _EventWork(slot.end(stream), device))
    return out
