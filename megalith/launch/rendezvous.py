"""Rendezvous handlers for torch elastic: one for a single launcher, one for launchers on several machines.

Launchers of several machines meet at `--rdzv-endpoint`. torch elastic pickles its state in that store, so every program
that can reach the port is trusted (docs/reliability.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from megalith.errors import ConfigError
from megalith.launch.network import LOOPBACK, address_towards, await_name, is_this_host, limited_silence
from megalith.launch.tcp_store import ANSWER_TIMEOUT, connect_store, not_a_rendezvous, serve_store

DEFAULT_PORT = 29400  # torch elastic's
LAST_CALL = 10  # seconds to wait for more machines once the minimum is reached
ANNOUNCE_INTERVAL = 1.0  # seconds between a running job's announcements, and between its reads of WAITING
SILENCE = 20.0  # seconds without an announcement after which a job no longer runs
RESIZE_LIMIT = 60.0  # seconds in which a job that is being resized meets the machines that wait for it
RUNNING = "megalith/running"  # key of the running job's last announcement
WAITING = "megalith/waiting"  # key of the number of machines that wait for that job
RESIZING = "resizing"  # prefix of an announcement: the job meets the machines that wait


@dataclass(frozen=True)
class Membership:
    """A launcher's membership in a running job that supports in-process restart."""

    group_rank: int
    address: str
    """Address and port of the store that the job's ranks use."""
    port: int
    resizes: int
    """Resizes of the job before this round."""

    def is_of(self, other: Membership) -> bool:
        """Return True if `other` belongs to the same job, with the same store and after the same number of resizes."""
        return asdict(self) | {"group_rank": other.group_rank} == asdict(other)


class SingleNodeRendezvous(RendezvousHandler):
    """Rendezvous of a single launcher, with a store on loopback.

    Attributes:
        job: unique name of this start of the job.
        serves_store: True if this launcher serves the rendezvous store.
        is_elastic: True if the number of machines may change.
        running: the job that the last round has joined or continued, or None if it has started all processes.
    """

    use_agent_store, serves_store, is_elastic, running = True, True, False, None

    def __init__(self) -> None:
        self.job = uuid.uuid4().hex

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = serve_store()  # a new one per attempt, which replaces the last
        address = RendezvousStoreInfo(LOOPBACK, self._store.port)
        return RendezvousInfo(PrefixStore("launcher", self._store), 0, 1, address)

    def get_backend(self) -> str:
        return "one machine"

    def get_run_id(self) -> str:
        return self.job

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class MultiNodeRendezvous(RendezvousHandler):
    """torch elastic's rendezvous over a store that the first launcher on the endpoint's machine serves.

    A launcher of another job is rejected. In each round, the launcher of rank 0 serves a new store for the ranks:
    torch would keep using the first round's store, whose address a machine that joins later does not know.

    torch removes a launcher that has been silent for 15 s, for example on an overloaded machine, even if its ranks
    still run. A machine that waits to join could then complete a round without the others. A running job therefore
    announces itself, and the machine asks the job to meet again.

    Args:
        endpoint: "host:port" on one of the machines.
        run_id: name of the job, the same on all machines.
        nnodes: minimum and maximum number of machines.
        options: options of torch's rendezvous.

    Raises:
        ConfigError: the endpoint is malformed, unreachable or used by another job.

    Attributes:
        job: unique name of this start of the job, the same on all machines.
        serves_store: True if this launcher serves the rendezvous store.
        is_elastic: True if the number of machines may change.
        running: member 0 of the job that the last round has joined or continued, or None if the round starts all
            processes.
        members: launchers whose ranks continue in their processes after the last round; their group ranks come first.
        hides_waiting: report no waiting machines, because they join without a restart of all processes.
    """

    use_agent_store = True

    def __init__(self, endpoint: str, run_id: str, nnodes: tuple[int, int], **options: Any):
        try:
            self._host, self._port = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
        except ValueError as error:
            raise ConfigError(
                f"--rdzv-endpoint is {endpoint!r} ({str(error).rstrip('.')}); write HOST:PORT"
            ) from None
        self._server: Store | None = None
        self._next: RendezvousInfo | None = None
        self.running: Membership | None = None
        self.members, self.hides_waiting = 0, False
        self._has_met = False
        self._waiting, self._waiting_read_at = 0, 0.0
        self._announcements, self._announce_at = 0, 0.0
        self._resizing, self._resizing_since = (
            "",
            0.0,
        )  # an announcement, and when this launcher first read it
        min_nodes, max_nodes = nnodes
        self.is_elastic = min_nodes < max_nodes
        count = f"{max_nodes}" if min_nodes == max_nodes else f"{min_nodes} to {max_nodes}"
        print(
            f"waiting at {self._host}:{self._port} for the launchers of {count} machines (--rdzv-id {run_id})",
            file=sys.stderr,
        )
        self.serves_store = False
        self._store, self.job = self._open(run_id)
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # the ranks get a store of their own
        parameters = RendezvousParameters(
            "c10d", endpoint, run_id, *nnodes, last_call_timeout=LAST_CALL, **options
        )
        self._inner = create_handler(self._store, C10dRendezvousBackend(self._store, run_id), parameters)

    def _open(self, run_id: str) -> tuple[TCPStore, str]:
        """Serve the rendezvous store or connect to it.

        Returns the store and the unique name of this start of the job.
        """
        key, timeout = "megalith/job", timedelta(seconds=60)
        self._address = self._host
        await_name(self._host)
        if is_this_host(self._host):
            with suppress(OSError):  # the port is taken, presumably by another launcher on this machine
                store, job = serve_store(self._host, self._port, timeout), uuid.uuid4().hex
                store.set(key, json.dumps([run_id, job]))
                self.serves_store = True
                return store, job
        with limited_silence(timeout.total_seconds()):
            store = connect_store(self._host, self._port, timeout)
        self._address = address_towards(self._host, self._port)
        try:
            store.wait([key], timedelta(seconds=ANSWER_TIMEOUT))
            other_id, job = json.loads(store.get(key))
        except (RuntimeError, ValueError):
            raise not_a_rendezvous(self._host, self._port) from None
        if other_id != run_id:
            raise ConfigError(
                f"{self._host}:{self._port} is the rendezvous of another job, {other_id}, not {run_id}; choose another "
                "port, start the same command on every machine (the id is derived from it), or pass the same "
                "--rdzv-id on all machines"
            )
        return store, job

    def next_rendezvous(self) -> RendezvousInfo:
        info, self._next = self._next, None
        if info is None:
            self._end_announcements()
            info = self._rendezvous(None)
            while self.running is None and not self._has_met and self._await_running_job():
                info = self._rendezvous(None)
        self._has_met = True
        return info

    def announce(self) -> None:
        """Record that the job's ranks run. Only the launcher of group rank 0 calls this method, repeatedly."""
        now = time.monotonic()
        if not self.is_elastic or now < self._announce_at:
            return
        self._announcements, self._announce_at = self._announcements + 1, now + ANNOUNCE_INTERVAL
        with suppress(RuntimeError):  # the launcher that serves the store has ended
            self._store.set(RUNNING, f"{self._announcements}")

    def _end_announcements(self) -> None:
        if self._announcements:
            self._announcements, self._announce_at = 0, 0.0
            with suppress(RuntimeError):
                self._store.set(RUNNING, "")

    def _await_running_job(self) -> bool:
        """Signal to a running job that this machine is waiting, and wait until the job's launchers meet again.

        Returns False if no job is running.

        True means that the caller must take part in another round with the job.
        """
        first = self._announcement()
        if not first:
            return False
        if first.startswith(RESIZING):
            if self._resizing != first:
                self._resizing, self._resizing_since = first, time.monotonic()
            return time.monotonic() - self._resizing_since < RESIZE_LIMIT
        self._store.add(WAITING, 1)
        last, deadline = first, time.monotonic() + SILENCE
        while time.monotonic() < deadline:
            time.sleep(0.2)
            newest = self._announcement()
            if not newest or newest.startswith(RESIZING):
                return True
            if newest != last:
                last, deadline = newest, time.monotonic() + SILENCE
        self._store.set(WAITING, "0")
        return False

    def _announcement(self) -> str:
        return self._store.get(RUNNING).decode() if self._store.check([RUNNING]) else ""

    def resize(self, member: Membership) -> RendezvousInfo | None:
        """Meet the other launchers while this machine's ranks keep their processes.

        Returns:
            The result of the round. None if the ranks have to start again; the next call of `next_rendezvous` then
            returns the result.
        """
        self._waiting = 0
        if member.group_rank == 0:
            self._store.set(WAITING, "0")
            self._store.set(RUNNING, f"{RESIZING} {member.resizes}")
            self._announce_at = 0.0
        info = self._rendezvous(member)
        if self.running is not None and self.running.is_of(member):
            return info
        self._end_announcements()
        self._next = info
        return None

    def _rendezvous(self, member: Membership | None) -> RendezvousInfo:
        """Meet the other launchers. Members of a running job keep their order, and new launchers come after them."""
        info = self._inner.next_rendezvous()
        launcher = {"serves_store": self.serves_store, "member": member and asdict(member)}
        info.store.set(f"megalith/launcher/{info.rank}", json.dumps(launcher))
        launchers = [
            json.loads(info.store.get(f"megalith/launcher/{rank}")) for rank in range(info.world_size)
        ]
        members = {
            rank: Membership(**each["member"]) for rank, each in enumerate(launchers) if each["member"]
        }
        first = [each for each in members.values() if each.group_rank == 0]
        self.running = first[0] if len(first) == 1 else None
        group_ranks = {}
        if self.running is not None:
            group_ranks = {
                rank: each.group_rank for rank, each in members.items() if self.running.is_of(each)
            }
        self.members = len(group_ranks)

        def order(rank: int) -> tuple[int, bool, int]:
            serves = self.is_elastic and launchers[rank]["serves_store"]
            return group_ranks.get(rank, info.world_size), not serves, rank

        rank = sorted(range(info.world_size), key=order).index(info.rank)
        if rank == 0:
            if self.running is None:
                self._server = serve_store(self._address)
            info.store.set("megalith/ranks", json.dumps([self._address, self._server.port]))
        else:
            self._announcements = 0  # another launcher announces the job
        address = RendezvousStoreInfo(*json.loads(info.store.get("megalith/ranks")))
        return RendezvousInfo(info.store, rank, info.world_size, address)

    def waiting(self) -> int:
        """Return the number of machines that wait to join. Asks the store at most once per second."""
        now = time.monotonic()
        if self.is_elastic and now >= self._waiting_read_at + ANNOUNCE_INTERVAL:
            self._waiting, self._waiting_read_at = self._store.add(WAITING, 0), now
        return self._inner.num_nodes_waiting() + self._waiting

    def get_backend(self) -> str:
        return self._inner.get_backend()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return 0 if self.hides_waiting else self.waiting()

    def shutdown(self) -> bool:
        return self._inner.shutdown()


def default_run_id(command: Sequence[str], nnodes: tuple[int, int]) -> str:
    """Derive a job's id from its command, so that it is the same on all machines."""
    content = json.dumps([list(command), nnodes])
    return f"megalith-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
