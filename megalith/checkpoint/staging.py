"""Copies of tensors in host memory, in buffers that are reused from one save to the next.

A background save writes the state as it was when the save began, so the state is copied first, and training waits only
for that copy. Copies from a GPU go into page-locked memory at the full speed of the bus; all are queued and waited for
once. The buffers are slabs whose size is a power of two, because torch's allocator of page-locked memory rounds sizes
up to powers of two. A tensor may span several slabs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megalith.checkpoint.files import HostBytes, byte_view

SLAB = 2**28  # bytes


class Staging:
    """Host memory for one copy of the tensors that a rank saves."""

    def __init__(self, slab: int = SLAB):
        self._slab = slab
        self._slabs: list[Tensor] = []
        self._end = 0
        self._devices: set[torch.device] = set()

    def copy(self, tensors: Iterable[Tensor]) -> list[HostBytes]:
        """Copy the tensors. The copies are valid until the next call, which reuses the memory."""
        self.begin()
        copies = self.add(tensors)
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def begin(self) -> None:
        """Reuse the memory for other tensors."""
        self._end, self._devices = 0, set()

    def add(self, tensors: Iterable[Tensor]) -> list[HostBytes]:
        """Queue copies of the tensors to host memory, placed after the tensors added since `begin`. The copies are
        complete when the device's current stream has reached this point.
        """
        copies = []
        for tensor in tensors:  # one at a time: some are created on iteration
            if tensor.is_cuda:
                self._devices.add(tensor.device)
            source, parts = byte_view(tensor), []
            while source.numel():
                room = self._room(self._end, pinned=bool(self._devices))[: source.numel()]
                room.copy_(source[: room.numel()], non_blocking=True)
                parts.append(room)
                source, self._end = source[room.numel() :], self._end + room.numel()
            copies.append(HostBytes(tensor.dtype, tuple(tensor.shape), parts))
        return copies

    def buffers(self) -> list[Tensor]:
        """Return the concatenated bytes of all tensors since `begin`: uint8, one-dimensional."""
        full, rest = divmod(self._end, self._slab)
        return self._slabs[:full] + ([self._slabs[full][:rest]] if rest else [])

    @property
    def bytes(self) -> int:
        """Bytes of host memory that the tensors since `begin` occupy."""
        return self._end

    def _room(self, at: int, pinned: bool) -> Tensor:
        """Return the free bytes from position `at` to the end of its slab."""
        number, start = divmod(at, self._slab)
        if number == len(self._slabs):
            self._slabs.append(torch.empty(self._slab, dtype=torch.uint8, pin_memory=pinned))
        return self._slabs[number][start:]
