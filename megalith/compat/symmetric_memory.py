"""GPU memory that other GPUs can read, and the registration of collectives that use it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor
from torch.distributed import Work


def allocate(size: int, device: torch.device) -> Tensor:
    """Return uint8 [size] that other GPUs can map after `rendezvous`."""
    return symmetric.empty(size, dtype=torch.uint8, device=device)


def rendezvous(memory: Tensor, group: str) -> Any:
    """Map the `memory` of all ranks of a process group. Collective.

    Returns:
        A handle with rank, world_size and get_buffer(rank, shape, dtype), a view of a rank's memory.
    """
    return symmetric.rendezvous(memory, group)


def register_work(x: Tensor, work: Work) -> None:
    """Make wait_tensor(x) of torch's functional collectives call `work.wait()`."""
    torch._C._distributed_c10d._register_work(x, work)


def current_stream_handle(device: int) -> int:
    """Return the CUDA handle of the device's current stream, without creating a torch.cuda.Stream."""
    return torch._C._cuda_getCurrentRawStream(device)
