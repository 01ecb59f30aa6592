"""Process groups for rank 0's broadcast of weights to the engines' workers.

They are separate from the trainer's groups, because torchrun does not know the workers. Rank 0 hosts the store;
workers join as ranks 1, 2, … when their server requests it. A broadcast never ends if a worker has died, so broadcasts
run in threads that are awaited with a deadline. On a GPU each thread has its own stream, so that a pending broadcast
does not block others. Aborting an abandoned group ends NCCL's kernel and the thread.
"""

from __future__ import annotations

import base64
import pickle
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from torch.multiprocessing.reductions import reduce_tensor

from megalith.compat.process_groups import set_nccl_timeout
from megalith.errors import ConfigError, MegalithError, TrainingError
from megalith.rl.engines.deadline import Deadline, InThread


class BroadcastGroup(Protocol):
    """Interface of a group in which rank 0 broadcasts tensors."""

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast the tensors in order. Returns after the workers have received them."""

    def abort(self) -> None:
        """Abort a broadcast that runs in another thread. The group is unusable afterwards."""


class Background:
    """A collective that runs in a separate thread, so that the caller does not hang if other processes never
    join it.
    """

    def __init__(self, act: Callable[[], Any], description: str, device: torch.device):
        """Start `act` in a thread. Its collectives run on `device`, on a separate stream."""

        def on_device() -> Any:
            if device.type != "cuda":
                return act()
            torch.cuda.set_device(device)
            with torch.cuda.stream(torch.cuda.Stream(device)):
                return act()

        self._description, self._thread = description, InThread(on_device)

    def result(self, deadline: Deadline) -> Any:
        """Wait for the collective and return its result. Raise TrainingError if it fails or the deadline passes."""
        if not self._thread.wait(deadline.left()):
            raise TrainingError(
                f"{self._description} did not finish within {deadline.seconds:g} s ({deadline.setting}): a worker of "
                "the engine did not take part; look at the engine's log"
            )
        try:
            return self._thread.result()
        except MegalithError:
            raise
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise TrainingError(f"{self._description} failed: {reason}; look at the engine's log") from None


class TorchGroup:
    """A torch process group with its own store, for SGLang.

    It is equivalent to a group that `init_process_group` creates with this name.
    """

    def __init__(self, backend: str, store: TCPStore, name: str, size: int, timeout: float):
        """Create the group and wait for the workers."""
        device = "cuda" if backend == "nccl" else "cpu"
        keys = PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        limit = timedelta(seconds=timeout)
        self._store = store  # must live as long as the group
        if backend == "gloo":
            self._group = ProcessGroupGloo(keys, 0, size, timeout=limit)
        else:
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            set_nccl_timeout(options, limit)
            self._group = ProcessGroupNCCL(keys, 0, size, options)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._group.broadcast(tensor, 0).wait()
        if tensors and tensors[0].is_cuda:
            torch.cuda.current_stream().synchronize()

    def abort(self) -> None:
        self._group.abort()


class VllmNcclGroup:
    """vLLM's own communicator, which its workers expect with `nccl`."""

    def __init__(self, address: str, port: int, size: int):
        """Create the group and wait for the workers. Raise ConfigError if vLLM is not installed with the trainer."""
        try:
            from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
            from vllm.distributed.utils import StatelessProcessGroup
        except ImportError:
            raise ConfigError(
                "rl.weight_sync_method is nccl, but vLLM is not installed with the trainer, and "
                "vLLM's workers accept only vLLM's own communicator: pip install the server's "
                "vLLM version here too, or set rl.weight_sync_method to checkpoint"
            ) from None
        group = StatelessProcessGroup.create(host=address, port=port, rank=0, world_size=size)
        self._group = PyNcclCommunicator(group, device=torch.cuda.current_device())

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        stream = torch.cuda.current_stream()
        for tensor in tensors:
            self._group.broadcast(tensor, src=0, stream=stream)
        stream.synchronize()

    def abort(self) -> None:
        self._group.nccl.lib.ncclCommAbort(self._group.comm)  # vLLM's wrapper has no method for it


def memory_handles(tensors: Sequence[Tensor]) -> str:
    """Return handles that let one other process on the same GPU open the tensors' memory.

    They are the GPU's UUID and the arguments of torch's `rebuild_cuda_tensor` for each tensor, pickled, in base64,
    which is the format that vLLM takes over HTTP. The memory is reused only after that process has released it: vLLM
    keeps the tensors of a layer until the layer is complete, which may take several buckets. Each process needs its own
    handles, because handles count references.
    """
    device = torch.cuda.get_device_properties(tensors[0].device)
    opened = [{str(device.uuid): reduce_tensor(tensor)[1]} for tensor in tensors]
    return base64.b64encode(pickle.dumps(opened)).decode()


def free_port(address: str) -> int:
    """Return a port that is currently free."""
    with socket.create_server((address, 0)) as server:
        return server.getsockname()[1]
