"""The group over which rank 0 of the trainer broadcasts weights to the workers of engines.

It is none of the trainer's process groups: the other side are processes that torchrun knows nothing of. Rank 0 keeps
the store; workers join it as ranks 1, 2, … when their server is asked to. A broadcast has no end where a worker has
died, so all of it happens in threads that are waited for with a deadline. On a GPU such a broadcast would hold up
whatever its stream has next: each thread has a stream of its own, and a group that is left behind is aborted, which
ends NCCL's kernel and the thread with it.
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

from megalith.errors import ConfigError, MegalithError, TrainingError
from megalith.rl.engines.deadline import Deadline, InThread


class BroadcastGroup(Protocol):
    """Sends from rank 0."""

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor by itself, in order; over once the workers have them."""

    def abort(self) -> None:
        """Ends a broadcast that is under way in another thread; of no use after it."""


class Background:
    """A collective with processes that may not come, in a thread."""

    def __init__(self, act: Callable[[], Any], what: str, device: torch.device):
        """`device`: that of its collectives, on which the thread has a stream of its own."""

        def on_device() -> Any:
            if device.type != "cuda":
                return act()
            torch.cuda.set_device(device)
            with torch.cuda.stream(torch.cuda.Stream(device)):
                return act()

        self._what, self._thread = what, InThread(on_device)

    def result(self, deadline: Deadline) -> Any:
        """What it gave. Raises TrainingError for what it raised, or where the deadline comes first."""
        if not self._thread.is_over(deadline.left()):
            raise TrainingError(
                f"{self._what} is not over after {deadline.seconds:g} s ({deadline.setting}): a worker of the engine "
                "did not take part; look at its log"
            )
        try:
            return self._thread.result()
        except MegalithError:
            raise
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise TrainingError(f"{self._what} failed: {reason}; look at the engine's log") from None


class TorchGroup:
    """A group of torch's, as `init_process_group` of that name would make it over a store of its own: SGLang's."""

    def __init__(self, backend: str, store: TCPStore, name: str, size: int, timeout: float):
        """Waits for the workers."""
        device = "cuda" if backend == "nccl" else "cpu"
        keys = PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        limit = timedelta(seconds=timeout)
        self._store = store  # stays while the group does
        if backend == "gloo":
            self._group = ProcessGroupGloo(keys, 0, size, timeout=limit)
        else:
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = ProcessGroupNCCL(keys, 0, size, options)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._group.broadcast(tensor, 0).wait()
        if tensors and tensors[0].is_cuda:
            torch.cuda.current_stream().synchronize()

    def abort(self) -> None:
        self._group.abort()


class VllmNcclGroup:
    """vLLM's own communicator, which its workers' side of `nccl` expects."""

    def __init__(self, address: str, port: int, size: int):
        """Waits for the workers. Raises ConfigError where vLLM is not installed beside the trainer."""
        try:
            from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
            from vllm.distributed.utils import StatelessProcessGroup
        except ImportError:
            raise ConfigError(
                "rl.weight_sync_method is nccl, but vLLM is not installed beside the trainer, and its workers meet "
                "nobody but its own communicator: pip install the server's vLLM here too, or set it to checkpoint"
            ) from None
        group = StatelessProcessGroup.create(host=address, port=port, rank=0, world_size=size)
        self._group = PyNcclCommunicator(group, device=torch.cuda.current_device())

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        stream = torch.cuda.current_stream()
        for tensor in tensors:
            self._group.broadcast(tensor, src=0, stream=stream)
        stream.synchronize()

    def abort(self) -> None:
        self._group.nccl.lib.ncclCommAbort(self._group.comm)  # for which vLLM's wrapper has no method


def memory_handles(tensors: Sequence[Tensor]) -> str:
    """What opens the memory of a GPU's tensors in one other process on it: for each the GPU's UUID and the arguments of
    torch's `rebuild_cuda_tensor`, pickled and in base64, which is how vLLM takes them over HTTP.

    Their memory is used again once that process has let go of it: vLLM keeps what it was given of a layer until it has
    the whole layer, over the ends of buckets. Each process needs handles of its own, for they count to one."""
    device = torch.cuda.get_device_properties(tensors[0].device)
    opened = [{str(device.uuid): reduce_tensor(tensor)[1]} for tensor in tensors]
    return base64.b64encode(pickle.dumps(opened)).decode()


def free_port(address: str) -> int:
    """A port that nobody has at the moment."""
    with socket.create_server((address, 0)) as server:
        return server.getsockname()[1]
