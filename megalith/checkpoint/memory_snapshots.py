"""Snapshots of a run's state in the host memory of its ranks, for a restart that reads no storage.

Each rank copies its state into host memory and sends the copy to a partner rank, on another host if there are several.
A thread sends it while training continues. If a rank dies, its replacement receives the partner's copy, and the others
use their own. One snapshot per rank is complete at any time while the next one is made, so a rank has buffers for four
states: two of its own and two of the rank whose partner it is.

A snapshot can be restored only if each rank's state is complete in that rank's memory or in its partner's. Copies
have a SHA-256 per buffer, which is verified before a restore.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.checkpoint.agree import collectively
from megalith.checkpoint.files import byte_view
from megalith.checkpoint.staging import Staging
from megalith.checkpoint.state import OPTIMIZER
from megalith.comm.collectives import Axis, gather_json
from megalith.errors import CheckpointError
from megalith.launch.heartbeat import BACKGROUND, PATIENCE
from megalith.optim.moments import Moment
from megalith.parallel.shards import LocalShard

HASH_THREADS = 4

Shards = Mapping[str, Mapping[str, LocalShard]]  # by part and name


@dataclass
class Snapshot:
    """State of one rank after one step."""

    serial: int
    """Number of this snapshot in the order of all; the same on every rank. Steps may repeat after a loss spike."""
    description: dict[str, Any]
    """JSON: `tensors`, a list of [part, name, dtype, shape], and the run's other state."""
    buffers: list[Tensor]
    """The tensors' bytes, one after the other: uint8, one-dimensional."""
    digests: list[str] = field(default_factory=list)
    """SHA-256 of each buffer. Empty until the copy is complete."""

    def is_intact(self) -> bool:
        """Return True if the bytes have not changed since they were copied."""
        return bool(self.digests) and self.digests == _digests(self.buffers)


@dataclass(frozen=True)
class SnapshotResult:
    """Outcome of one snapshot."""

    step: int
    stalled: float
    """Seconds that training waited: for the previous snapshot's thread, and for the copy as far as it is not
    asynchronous."""
    seconds: float
    """Seconds until the partner's copy was complete."""
    error: str = ""


class MemorySnapshots:
    """This rank's snapshots, and the snapshots of the rank whose partner this rank is. They outlive a run's process
    groups.

    Args:
        is_aborted: returns True after this rank's collectives have been aborted. Later results of the device are
            invalid.
    """

    def __init__(self, is_aborted: Callable[[], bool] = lambda: False):
        self._is_aborted = is_aborted
        self._serial = 0
        self._local: dict[int, Snapshot] = {}  # by serial; at most two
        self._foreign: dict[int, Snapshot] = {}
        self._staging = [Staging(), Staging()]
        self._spare: list[Tensor] = []  # buffers of a foreign snapshot that was replaced
        self._world, self._stride = Axis(), 1
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._copied: torch.cuda.Event | None = None
        self._results: list[SnapshotResult] = []

    def connect(self, world: Axis, ranks_per_host: int) -> None:
        """Create the process group of the snapshots' thread. Every rank calls it after the job's groups are created.

        Args:
            world: all ranks.
            ranks_per_host: number of neighboring ranks on one host, which determines each rank's partner.
        """
        self._thread, self._failure, self._copied = None, None, None
        group = dist.new_group(backend="gloo", timeout=PATIENCE, group_desc=BACKGROUND)
        self._world = Axis(world.size, world.rank, group)
        self._stride = ranks_per_host if world.size > ranks_per_host else 1

    def take(self, description: Mapping[str, Any], shards: Shards) -> None:
        """Copy the state after a step. Returns once the copy has begun on the device; a thread does the rest.

        Waits for the previous snapshot. If a rank has too little memory, `results` reports it on every rank.

        Args:
            description: the run's state besides tensors, as JSON, with `step`.
            shards: this rank's tensors by part and name.
        """
        begin = time.monotonic()
        self.wait()
        self._serial += 1
        serial, error = self._serial, None
        for old in [other for other in self._local if other < serial - 1]:
            del self._local[old]
        try:
            tensors = _named_tensors(shards)
            content = {**description, "tensors": [_entry(*named) for named in tensors]}
            self._local[serial] = Snapshot(serial, content, self._copy(tensors, serial))
        except (RuntimeError, MemoryError) as failure:
            error = failure
        stalled = time.monotonic() - begin
        arguments = serial, int(description["step"]), error, begin, stalled
        self._thread = threading.Thread(
            target=self._complete, args=arguments, name="memory snapshot", daemon=True
        )
        self._thread.start()

    def _copy(self, tensors: Sequence[tuple[str, str, Tensor]], serial: int) -> list[Tensor]:
        """Copy tensors into this snapshot's buffers. Optimizer state from a GPU is copied while training goes on.

        `before_update` must be called before that state changes. Other tensors may change in the next forward pass.
        """
        staging = self._staging[serial % 2]
        staging.begin()
        staging.add(tensor for part, _, tensor in tensors if part != OPTIMIZER)
        optimizer_state = [tensor for part, _, tensor in tensors if part == OPTIMIZER]
        device = next((tensor.device for _, _, tensor in tensors if tensor.is_cuda), None)
        if device is None:
            staging.add(optimizer_state)
        else:
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                staging.add(optimizer_state)
                self._copied = stream.record_event()
        return staging.buffers()

    def before_update(self) -> None:
        """Make the device wait for a snapshot's copy before the optimizer changes the state."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Wait for the snapshot in progress. Raises its thread's error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def abandon(self, timeout: float) -> bool:
        """Wait for the thread after the process groups have been aborted. Return True if it has ended in time."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
        self._thread, self._failure = None, None
        return True

    def results(self) -> list[SnapshotResult]:
        """Return the results since the last call."""
        results, self._results = self._results, []
        return results

    @property
    def bytes(self) -> int:
        """Bytes of host memory in use on this rank."""
        foreign = [*(snapshot.buffers for snapshot in self._foreign.values()), self._spare]
        buffers = sum(buffer.nbytes for group in foreign for buffer in group)
        return buffers + sum(staging.bytes for staging in self._staging)

    def _complete(
        self, serial: int, step: int, error: Exception | None, begin: float, stalled: float
    ) -> None:
        try:
            self._replicate(serial, error)
            text = ""
        except CheckpointError as failure:  # the same on every rank
            self._local.pop(serial, None)
            self._foreign.pop(serial, None)
            self._serial = (
                serial - 1
            )  # the next snapshot uses the same buffers, not those of the last complete one
            text = str(failure)
        except BaseException as failure:
            self._failure = failure  # a lost rank or a bug; raised in the training thread
            return
        self._results.append(SnapshotResult(step, stalled, time.monotonic() - begin, text))

    def _replicate(self, serial: int, error: Exception | None) -> None:
        """Complete this rank's snapshot, and exchange it with the partners. Raises CheckpointError on every rank."""

        def finish() -> list[Any]:
            if error is not None:
                raise error
            snapshot = self._local[serial]
            if self._copied is not None:
                self._copied.synchronize()
            digests = _digests(snapshot.buffers)
            if self._is_aborted():  # the copied values may come from an aborted collective
                raise RuntimeError("the collectives of this rank were aborted")
            snapshot.digests = digests
            return [
                len(json.dumps(snapshot.description)),
                [buffer.numel() for buffer in snapshot.buffers],
                digests,
            ]

        world = self._world
        sizes = collectively(world, finish)
        source, partner = (world.rank - self._stride) % world.size, (world.rank + self._stride) % world.size
        length, counts, digests = sizes[source]
        received: list[Tensor] = []
        collectively(world, lambda: received.extend(self._foreign_buffers(serial, counts)))
        snapshot = self._local[serial]
        text = _exchange(json.dumps(snapshot.description).encode(), length, partner, source, world)
        _exchange_buffers(snapshot.buffers, received, partner, source, world)
        foreign = Snapshot(serial, json.loads(text), received, digests)

        def keep() -> None:
            if not foreign.is_intact():
                raise CheckpointError(f"the copy of rank {source}'s snapshot differs from the original")
            self._foreign[serial] = foreign

        collectively(world, keep)  # no rank may replace its previous snapshot before every rank has this one

    def _foreign_buffers(self, serial: int, counts: Sequence[int]) -> list[Tensor]:
        """Return buffers of these sizes. Reuse the buffers of the snapshot before the previous one if they fit."""
        for old in [other for other in self._foreign if other < serial - 1]:
            self._spare = self._foreign.pop(old).buffers
        spare, self._spare = self._spare, []
        if [buffer.numel() for buffer in spare] == list(counts):
            return spare
        return [torch.empty(count, dtype=torch.uint8) for count in counts]

    def find(self, world: Axis) -> int | None:
        """Return the serial of the newest snapshot that every rank can restore, or None. Collective."""
        mine = [sorted(_complete(self._local)), sorted(_complete(self._foreign))]
        everyone = gather_json(mine, world)
        for serial in sorted({serial for local, _ in everyone for serial in local}, reverse=True):
            partners = [everyone[(rank + self._stride) % world.size][1] for rank in range(world.size)]
            if all(serial in local or serial in copies for (local, _), copies in zip(everyone, partners)):
                return serial
        return None

    def fetch(self, serial: int, world: Axis) -> Snapshot | None:
        """Return this rank's snapshot, from the partner's memory if necessary. None on every rank if one is damaged.

        Collective. Later snapshots are dropped, because some ranks may not have them.
        """
        for snapshots in (self._local, self._foreign):
            for later in [other for other in snapshots if other > serial]:
                del snapshots[later]
        self._serial = serial
        has_local = serial in _complete(self._local)
        needed = [rank for rank, has in enumerate(gather_json(has_local, world)) if not has]
        for rank in needed:
            partner = (rank + self._stride) % world.size
            if world.rank == partner:
                _send(self._foreign[serial], rank, world)
            elif world.rank == rank:
                self._local[serial] = _receive(serial, partner, world)
        snapshot = self._local[serial]
        intact = all(gather_json(snapshot.is_intact(), world))
        if not intact:
            self._local.pop(serial)
            self._foreign.pop(serial, None)
        return snapshot if intact else None


def fill(snapshot: Snapshot, shards: Shards) -> None:
    """Copy a snapshot's tensors into shards of the same names, dtypes and shapes.

    Raises:
        CheckpointError: the shards do not match the snapshot.
    """
    tensors = _named_tensors(shards)
    if snapshot.description["tensors"] != [_entry(*named) for named in tensors]:
        raise CheckpointError("a snapshot in host memory does not fit the run's state; resume from storage")
    buffers, at = iter(snapshot.buffers), 0
    current = next(buffers, None)
    for _, _, tensor in tensors:
        values = torch.empty(tensor.shape, dtype=tensor.dtype)
        target, done = byte_view(values), 0
        while done < target.numel():
            if at == current.numel():
                current, at = next(buffers), 0
            part = current[at : at + target.numel() - done]
            target[done : done + part.numel()].copy_(part)
            done, at = done + part.numel(), at + part.numel()
        with torch.no_grad():
            tensor.copy_(values)


def _complete(snapshots: Mapping[int, Snapshot]) -> list[int]:
    return [serial for serial, snapshot in snapshots.items() if snapshot.digests]


def _named_tensors(shards: Shards) -> list[tuple[str, str, Tensor]]:
    """Return part, name and value of each tensor, optimizer state last. A moment with reduced precision has several."""
    tensors = []
    for part in sorted(shards, key=lambda part: part == OPTIMIZER):
        for name, shard in shards[part].items():
            if isinstance(shard.values, Moment):
                tensors += [
                    (part, f"{name}.{number}", each) for number, each in enumerate(shard.values.tensors)
                ]
            else:
                tensors.append((part, name, shard.values))
    return tensors


def _entry(part: str, name: str, tensor: Tensor) -> list[Any]:
    return [part, name, str(tensor.dtype), list(tensor.shape)]


def _digests(buffers: Sequence[Tensor]) -> list[str]:
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        return list(threads.map(lambda buffer: hashlib.sha256(buffer.numpy()).hexdigest(), buffers))


def _exchange(data: bytes, length: int, partner: int, source: int, world: Axis) -> bytes:
    received = torch.empty(length, dtype=torch.uint8)
    _exchange_buffers(
        [torch.frombuffer(bytearray(data), dtype=torch.uint8)], [received], partner, source, world
    )
    return received.numpy().tobytes()


def _exchange_buffers(
    sent: Sequence[Tensor], received: Sequence[Tensor], partner: int, source: int, world: Axis
) -> None:
    works = [dist.isend(buffer, partner, group=world.group) for buffer in sent]
    works += [dist.irecv(buffer, source, group=world.group) for buffer in received]
    for work in works:
        work.wait()


def _send(snapshot: Snapshot, rank: int, world: Axis) -> None:
    sizes = [buffer.numel() for buffer in snapshot.buffers]
    text = json.dumps([snapshot.description, snapshot.digests, sizes]).encode()
    dist.send(torch.tensor([len(text)]), rank, group=world.group)
    for buffer in (torch.frombuffer(bytearray(text), dtype=torch.uint8), *snapshot.buffers):
        dist.send(buffer, rank, group=world.group)


def _receive(serial: int, rank: int, world: Axis) -> Snapshot:
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, rank, group=world.group)
    text = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(text, rank, group=world.group)
    description, digests, sizes = json.loads(text.numpy().tobytes())
    buffers = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    for buffer in buffers:
        dist.recv(buffer, rank, group=world.group)
    return Snapshot(serial, description, buffers, digests)
