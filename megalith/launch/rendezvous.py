"""The rendezvous of launchers, as torch elastic's agent asks for it: of one alone, and of those of several machines."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
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
from megalith.launch.meeting import (
    ANSWER_PATIENCE,
    LOOPBACK,
    address_towards,
    hold_store,
    is_here,
    join_store,
    no_rendezvous,
)

DEFAULT_PORT = 29400  # torch elastic's
LAST_CALL = 10  # seconds that machines wait for more to come when there are as many as are needed


class OneMachine(RendezvousHandler):
    """The rendezvous of a launcher that is alone: nothing to agree on, and a store that loopback alone reaches."""

    use_agent_store = True

    def __init__(self) -> None:
        self.job = uuid.uuid4().hex

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = hold_store()  # of this attempt: the last one's ends with it
        place = RendezvousStoreInfo(LOOPBACK, self._store.port)
        return RendezvousInfo(PrefixStore("launcher", self._store), 0, 1, place)

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


class SeveralMachines(RendezvousHandler):
    """The launchers of `nnodes` machines, (least, most), at `endpoint`: torch elastic's rendezvous at a store of ours.

    The launcher on the endpoint's machine that comes first holds the store and says which job it is of; one of another
    job is refused. In every round the ranks get a store of their own, which the launcher of rank 0 holds: torch's would
    be that of the first round for ever, which a machine that comes later never learns of.
    """

    use_agent_store = True

    def __init__(self, endpoint: str, run_id: str, nnodes: tuple[int, int], **options: Any):
        """`options` are torch's for its rendezvous. Raises ConfigError where the machines cannot meet there."""
        try:
            self._host, self._port = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
        except ValueError as error:
            raise ConfigError(f"--rdzv-endpoint is {endpoint!r}: {error} Give host:port") from None
        self._server: Store | None = None
        least, most = nnodes
        count = f"{most}" if least == most else f"{least} to {most}"
        print(
            f"waiting at {self._host}:{self._port} for the launchers of {count} machines (--rdzv-id {run_id})",
            file=sys.stderr,
        )
        store, self.job = self._open(run_id)
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # the ranks' store is ours
        meeting = RendezvousParameters(
            "c10d", endpoint, run_id, *nnodes, last_call_timeout=LAST_CALL, **options
        )
        self._inner = create_handler(store, C10dRendezvousBackend(store, run_id), meeting)

    def _open(self, run_id: str) -> tuple[TCPStore, str]:
        """The store where the launchers meet, and the name of this start of the job."""
        key, timeout = "megalith/job", timedelta(seconds=60)
        self._address = self._host
        if is_here(self._host):
            with suppress(OSError):  # taken: by another launcher of this machine, it is to be hoped
                store, job = hold_store(self._host, self._port, timeout), uuid.uuid4().hex
                store.set(key, json.dumps([run_id, job]))
                return store, job
        store = join_store(self._host, self._port, timeout)
        self._address = address_towards(self._host, self._port)
        try:
            store.wait([key], timedelta(seconds=ANSWER_PATIENCE))
            held_for, job = json.loads(store.get(key))
        except (RuntimeError, ValueError):
            raise no_rendezvous(self._host, self._port) from None
        if held_for != run_id:
            raise ConfigError(
                f"at {self._host}:{self._port} another job meets, {held_for}, not {run_id}; choose another port, or "
                "start the same command on every machine (the id is made of it), or give all the same --rdzv-id"
            )
        return store, job

    def next_rendezvous(self) -> RendezvousInfo:
        met = self._inner.next_rendezvous()
        if met.rank == 0:
            self._server = hold_store(self._address)
            met.store.set("megalith/ranks", json.dumps([self._address, self._server.port]))
        place = RendezvousStoreInfo(*json.loads(met.store.get("megalith/ranks")))
        return RendezvousInfo(met.store, met.rank, met.world_size, place)

    def get_backend(self) -> str:
        return self._inner.get_backend()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def shutdown(self) -> bool:
        return self._inner.shutdown()


def id_of(command: Sequence[str], nnodes: tuple[int, int]) -> str:
    """The id of a job that was given none: the same on every machine that runs the same command."""
    told = json.dumps([list(command), nnodes])
    return f"megalith-{hashlib.sha256(told.encode()).hexdigest()[:12]}"
