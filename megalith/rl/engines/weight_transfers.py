"""Ways to send the weights of an update to servers (`rl.weight_sync_method`).

nccl and gloo broadcast them in a group. With `checkpoint`, rank 0 writes a folder that the servers read; with `ipc`,
requests carry memory handles. `lora` writes a folder with the adapters, which the servers load on their own base.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megalith.bridge.folder import CONFIG
from megalith.errors import MegalithError, TrainingError
from megalith.rl.engines.concurrent_calls import run_concurrently
from megalith.rl.engines.deadline import Deadline
from megalith.rl.engines.transfer_group import Background, memory_handles
from megalith.rl.engines.weight_stream import WeightBucket

if TYPE_CHECKING:
    from megalith.rl.engines.server_engine import ServerEngine


CLEANUP_SECONDS = 5.0  # per request after a failure


class GroupTransfer:
    """Weight update by broadcast, as rank 0 runs it. The tensors are on `device`."""

    def __init__(self, engine: ServerEngine, version: int, deadline: Deadline):
        self._engine, self._version, self._deadline = engine, version, deadline
        on_gpu = engine.settings.weight_sync_method in ("nccl", "ipc")
        self.device = engine._run.device if on_gpu else torch.device("cpu")

    def begin(self) -> None:
        self._group = self._engine.group(self._deadline)
        run_concurrently([lambda one=one: one.begin(self._deadline) for one in self._engine.servers])

    def take(self, bucket: WeightBucket) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the thread uses another stream
        act = lambda: self._group.broadcast(bucket.tensors)  # noqa: E731
        sent = Background(act, "the broadcast of weights", self.device)
        servers = self._engine.servers
        run_concurrently(
            [lambda one=one: one.receive(bucket, self._version, self._deadline) for one in servers]
        )
        sent.result(self._deadline)

    def finish(self) -> None:
        run_concurrently(
            [lambda one=one: one.finish(self._version, self._deadline) for one in self._engine.servers]
        )

    def abandon(self) -> None:
        give_up_update(self._engine)


class HandleTransfer(GroupTransfer):
    """Weight update through memory of rank 0's GPU. Workers on the same GPU open the memory and copy from it."""

    def begin(self) -> None:
        for server in self._engine.servers:
            if not server.facts.get("opens_memory"):
                server.open_memory(self._deadline)
                server.facts["opens_memory"] = True
        run_concurrently([lambda one=one: one.begin(self._deadline) for one in self._engine.servers])

    def take(self, bucket: WeightBucket) -> None:
        servers = self._engine.servers
        handles = [memory_handles(bucket.tensors) for _ in servers]
        torch.cuda.synchronize(self.device)  # all writes are done before another process reads
        run_concurrently(
            [
                lambda one=one, handle=handle: one.receive(bucket, self._version, self._deadline, handle)
                for one, handle in zip(servers, handles)
            ]
        )


class FolderTransfer:
    """Weight update through the folder OUTPUT/engine_weights. The trainer writes it, and the servers load it."""

    device = torch.device("cpu")

    def __init__(self, engine: ServerEngine, version: int, deadline: Deadline):
        self._engine, self._version, self._deadline = engine, version, deadline
        self._folder = (Path(engine._run.output) / "engine_weights").absolute()
        self._stack = ExitStack()

    def begin(self) -> None:
        self._writer = self._engine._stream.folder(self._folder)
        self._stack.enter_context(self._writer)

    def take(self, bucket: WeightBucket) -> None:
        for name, tensor in zip(bucket.names, bucket.tensors):
            self._writer.write(name, tensor)

    def finish(self) -> None:
        self._writer.write_json(CONFIG, self._engine._stream.config_json)
        self._stack.close()
        servers = self._engine.servers
        run_concurrently(
            [lambda one=one: one.load_folder(self._folder, self._version, self._deadline) for one in servers]
        )

    def abandon(self) -> None:
        error = TrainingError("the update failed")
        with suppress(MegalithError, OSError):
            self._stack.__exit__(type(error), error, None)
        give_up_update(self._engine)


def give_up_update(engine: ServerEngine) -> None:
    engine.forget()
    if engine._world.rank:
        return
    for server in engine.servers:
        with suppress(MegalithError):
            server.give_up(Deadline(CLEANUP_SECONDS, "weight sync"))
