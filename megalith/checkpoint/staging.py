"""Copies of tensors in host memory, in buffers that stay from one save to the next.

A background save writes what the state was when the save began, so the state is copied first; only for that does
training wait. From a GPU the copies go into page-locked memory, at the full speed of the bus, all of them queued and
waited for once. The buffers are slabs of a power of two, for torch's allocator of page-locked memory rounds up to one;
a tensor may lie in several.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megalith.checkpoint.files import HostBytes, byte_view

SLAB = 2**28  # bytes


class Staging:
    """Host memory for one copy of a rank's share of the state."""

    def __init__(self, slab: int = SLAB):
        self._slab = slab
        self._slabs: list[Tensor] = []

    def copy(self, tensors: Iterable[Tensor]) -> list[HostBytes]:
        """The tensors as they are now. The copies last until the next call, which reuses the memory."""
        tensors = list(tensors)
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        copies, at = [], 0
        for tensor in tensors:
            source, parts = byte_view(tensor), []
            while source.numel():
                room = self._room(at, pinned=bool(devices))[: source.numel()]
                room.copy_(source[: room.numel()], non_blocking=True)
                parts.append(room)
                source, at = source[room.numel() :], at + room.numel()
            copies.append(HostBytes(tensor.dtype, tuple(tensor.shape), parts))
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def _room(self, at: int, pinned: bool) -> Tensor:
        """What is free behind the byte `at`, up to the end of its slab."""
        number, start = divmod(at, self._slab)
        if number == len(self._slabs):
            self._slabs.append(torch.empty(self._slab, dtype=torch.uint8, pin_memory=pinned))
        return self._slabs[number][start:]
