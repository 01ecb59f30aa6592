"""Snapshots of a run's state in the host memory of its ranks, for restarts without storage access.

Each rank copies its state into host memory and sends the copy to a partner rank, on another host if there are several.
A thread sends it while training continues. If a rank dies, its replacement receives the partner's copy, and the others
use their own. While a snapshot is made, the previous one stays complete. A rank therefore has buffers for four states:
two of its own, and two of the rank whose partner it is.

A snapshot can be restored only if each rank's state is complete in that rank's memory or in its partner's. Copies
have a SHA-256 per buffer, which is verified before a restore. If the number of ranks has changed since, each rank
assembles its new shards from the old ones (memory_resharding.py).
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
from megalith.checkpoint.memory_resharding import Placed, Shards, placed_tensors, reshard
from megalith.checkpoint.staging import Staging
from megalith.checkpoint.state import OPTIMIZER
from megalith.comm.collectives import Axis, gather_json
from megalith.errors import CheckpointError
from megalith.launch.heartbeat import BACKGROUND, PATIENCE

HASH_THREADS = 4


@dataclass
class Snapshot:
    """The state of one rank after a step."""

    serial: int
    """Position of this snapshot in the order of all snapshots; the same on every rank. Steps may repeat after a loss
    spike."""
    description: dict[str, Any]
    """JSON: `tensors`, the entries of `Placed`; `world`, the number of ranks and this rank; the run's other state."""
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
    """Seconds that training waited: for the previous snapshot's thread, and for the part of the copy that is not
    asynchronous."""
    seconds: float
    """Seconds until the partner's copy was complete."""
    error: str = ""


class MemorySnapshots:
    """This rank's snapshots and, as its partner, another rank's snapshots. They outlive a run's process groups.

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
        """Create the process group of the snapshots' thread.

        Collective over all ranks, after the job's groups are created.

        Args:
            world: all ranks.
            ranks_per_host: number of neighboring ranks on one host, which determines each rank's partner.
        """
        self._thread, self._failure, self._copied = None, None, None
        alone = world.size == 1
        group = None if alone else dist.new_group(backend="gloo", timeout=PATIENCE, group_desc=BACKGROUND)
        self._world = Axis(world.size, world.rank, group)
        self._stride = ranks_per_host if world.size > ranks_per_host else 1

    def take(self, description: Mapping[str, Any], shards: Shards) -> None:
        """Copy the state after a step. Returns once the device has begun the copy; a thread finishes it.

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
            tensors = placed_tensors(shards)
            entries = [placed.entry() for placed in tensors]
            content = {**description, "tensors": entries, "world": [self._world.size, self._world.rank]}
            self._local[serial] = Snapshot(serial, content, self._copy(tensors, serial))
        except (RuntimeError, MemoryError) as failure:
            error = failure
        stalled = time.monotonic() - begin
        arguments = serial, int(description["step"]), error, begin, stalled
        self._thread = threading.Thread(
            target=self._complete, args=arguments, name="memory snapshot", daemon=True
        )
        self._thread.start()

    def _copy(self, tensors: Sequence[Placed], serial: int) -> list[Tensor]:
        """Copy tensors into this snapshot's buffers. Optimizer state is copied from a GPU while training continues.

        `before_update` must be called before that state changes. Other tensors may change in the next forward pass.
        """
        staging = self._staging[serial % 2]
        staging.begin()
        staging.add(placed.values for placed in tensors if placed.part != OPTIMIZER)
        optimizer_state = [placed.values for placed in tensors if placed.part == OPTIMIZER]
        device = next((placed.values.device for placed in tensors if placed.values.is_cuda), None)
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
        if world.size == 1:
            return
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
        """Return the number of the newest snapshot that the ranks can restore, or None. Collective.

        If there is none, all ranks continue the numbering of snapshots from the same serial.
        """
        everyone = gather_json([_worlds(self._local), _worlds(self._foreign)], world)
        for serial in sorted(
            {int(serial) for maps in everyone for map in maps for serial in map}, reverse=True
        ):
            if _is_complete(serial, everyone, self._stride):
                return serial
        self._local.clear()
        self._foreign.clear()
        self._serial = max(gather_json(self._serial, world))
        return None

    def fetch(self, serial: int, world: Axis, shards: Shards) -> Snapshot | None:
        """Return this rank's snapshot, from other ranks' memory if necessary. None on every rank if one is damaged.

        Collective. Later snapshots are dropped, because some ranks may not have them.

        Args:
            serial: result of `find`.
            world: all ranks.
            shards: the tensors to restore.
        """
        for snapshots in (self._local, self._foreign):
            for later in [other for other in snapshots if other > serial]:
                del snapshots[later]
        self._serial = serial
        everyone = gather_json([_worlds(self._local), _worlds(self._foreign)], world)
        if _has_same_ranks(serial, everyone, self._stride):
            snapshot = self._fetch_from_partner(serial, world)
            intact = all(gather_json(snapshot.is_intact(), world))
        else:
            snapshots = [each[serial] for each in (self._local, self._foreign) if serial in _complete(each)]
            intact = all(gather_json(all(each.is_intact() for each in snapshots), world))
            snapshot = self._resharded(snapshots, world, shards) if intact else None
        if not intact or snapshot is None:
            self._local.pop(serial, None)
            self._foreign.pop(serial, None)
            return None
        return snapshot

    def _fetch_from_partner(self, serial: int, world: Axis) -> Snapshot:
        has_local = serial in _complete(self._local)
        needed = [rank for rank, has in enumerate(gather_json(has_local, world)) if not has]
        for rank in needed:
            partner = (rank + self._stride) % world.size
            if world.rank == partner:
                _send(self._foreign[serial], rank, world)
            elif world.rank == rank:
                self._local[serial] = _receive(serial, partner, world)
        return self._local[serial]

    def _resharded(self, snapshots: Sequence[Snapshot], world: Axis, shards: Shards) -> Snapshot | None:
        """Return this rank's shards of a snapshot from another number of ranks.

        Returns None on every rank if it does not fit.
        """
        first = next((each.description for each in snapshots if each.description["world"][1] == 0), None)
        rest = first and {name: value for name, value in first.items() if name != "tensors"}
        rest = next(each for each in gather_json(rest, world) if each is not None)
        buffers = reshard([(each.description["tensors"], each.buffers) for each in snapshots], shards, world)
        if buffers is None:
            return None
        entries = [placed.entry() for placed in placed_tensors(shards)]
        return Snapshot(self._serial, {**rest, "tensors": entries}, buffers)


def fill(snapshot: Snapshot, shards: Shards) -> None:
    """Copy a snapshot's tensors into shards of the same names, dtypes and shapes.

    Raises:
        CheckpointError: the shards do not match the snapshot.
    """
    tensors = placed_tensors(shards)
    if snapshot.description["tensors"] != [placed.entry() for placed in tensors]:
        raise CheckpointError(
            "a snapshot in host memory does not match the run's state; resume from a saved checkpoint"
        )
    buffers, at = iter(snapshot.buffers), 0
    current = next(buffers, None)
    for tensor in (placed.values for placed in tensors):
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


Worlds = Mapping[str, Sequence[int]]  # serial -> number of ranks, and the rank whose state it is


def _worlds(snapshots: Mapping[int, Snapshot]) -> Worlds:
    """Return, for each complete snapshot by its number, its origin as JSON: the number of ranks, and the rank whose
    state it is.
    """
    return {str(serial): snapshots[serial].description["world"] for serial in _complete(snapshots)}


def _origins(serial: int, everyone: Sequence[Sequence[Worlds]]) -> set[tuple[int, int]]:
    return {tuple(worlds[str(serial)]) for both in everyone for worlds in both if str(serial) in worlds}


def _is_complete(serial: int, everyone: Sequence[Sequence[Worlds]], stride: int) -> bool:
    """Return True if each rank's state of the snapshot is still in some rank's memory.

    Args:
        serial: serial of the snapshot.
        everyone: origins of the local and the foreign snapshots of each rank.
        stride: distance of each rank from its partner.
    """
    size, key = len(everyone), str(serial)
    if _has_same_ranks(serial, everyone, stride):
        partners = [everyone[(rank + stride) % size][1] for rank in range(size)]
        return all(key in local or key in copies for (local, _), copies in zip(everyone, partners))
    origins = _origins(serial, everyone)
    sizes = {size for size, _ in origins}
    return len(sizes) == 1 and len(origins) == sizes.pop()


def _has_same_ranks(serial: int, everyone: Sequence[Sequence[Worlds]], stride: int) -> bool:
    """Return True if the job has the number of ranks that it had at the snapshot, and each rank that holds a copy has
    the same rank and partner as then.
    """
    size, key = len(everyone), str(serial)
    return all(
        local.get(key, [size, rank]) == [size, rank]
        and foreign.get(key, [size, (rank - stride) % size]) == [size, (rank - stride) % size]
        for rank, (local, foreign) in enumerate(everyone)
    )


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
