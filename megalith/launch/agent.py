"""The launcher's own process: torch's elastic agent, and what a training job needs of it besides.

The agent starts this machine's processes, watches them, and after a failure joins the other machines in a new
rendezvous and restarts them, with as many ranks as there are then. Here it also

- hands stop signals on to its processes and lets them take their time, which a checkpoint needs;
- ends the other ranks at once when one has failed: all that they could do is wait for it;
- ends its ranks where they wait for those of a machine that is lost before they are connected;
- starts nothing again that was refused with a reason: it would be refused again;
- keeps the first failure, which tells more than those of the attempts after it.

The rendezvous of launchers, as torch elastic's agent asks for it: of one alone, and of those of several machines.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from subprocess import Popen
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from megalith.errors import REFUSALS, ConfigError
from megalith.launch.failure import CRASH_FILE, CRASHES, Failure, first_failure
from megalith.launch.rendezvous import (
    ANSWER_PATIENCE,
    CONNECTED_FILE,
    LOOPBACK,
    PeerWatch,
    address_towards,
    await_name,
    connect_store,
    is_this_host,
    no_rendezvous,
    serve_store,
)
from megalith.launch.signals import STOP_SIGNALS, handled_stop_signals
from megalith.launch.stops import STOP_CODE_FILE

DEFAULT_PORT = 29400  # torch elastic's
LAST_CALL = 10  # seconds that machines wait for more to come when there are as many as are needed


class OneMachine(RendezvousHandler):
    """The rendezvous of a launcher that is alone: nothing to agree on, and a store that loopback alone reaches."""

    use_agent_store, serves_store = True, True

    def __init__(self) -> None:
        self.job = uuid.uuid4().hex

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = serve_store()  # of this attempt: the last one's ends with it
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
        self.serves_store = False
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
        await_name(self._host)
        if is_this_host(self._host):
            with suppress(OSError):  # taken: by another launcher of this machine, it is to be hoped
                store, job = serve_store(self._host, self._port, timeout), uuid.uuid4().hex
                store.set(key, json.dumps([run_id, job]))
                self.serves_store = True
                return store, job
        store = connect_store(self._host, self._port, timeout)
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
            self._server = serve_store(self._address)
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


TELLING = 3.0  # seconds that the others have when a rank has died of an error of the program
SAVING = 60.0  # seconds that ranks may take to end with a checkpoint when a machine has come


class Agent(LocalElasticAgent):
    """`run` returns when the job is done or has failed for good."""

    def __init__(self, spec: WorkerSpec, logs_specs: LogsSpecs):
        super().__init__(spec, logs_specs)
        self.failures: list[Failure] = []
        """What failed first on this machine in each attempt that did not go well."""
        self.world_size = spec.local_world_size
        """Ranks of the whole job in its last attempt."""
        self.job = spec.rdzv_handler.job
        """Names this job and no other, on all of its machines."""
        self._asked = False
        self._heeded = handled_stop_signals()
        self._ended_by_us: set[int] = set()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for name in (STOP_CODE_FILE, CRASH_FILE, CONNECTED_FILE):  # of the ranks before
            Path(os.environ[name]).unlink(missing_ok=True)
        ids = super()._start_workers(worker_group)
        for number in STOP_SIGNALS:  # elastic's own handlers take over what `nohup` has us ignore
            signal.signal(number, self._hand_on if number in self._heeded else signal.SIG_IGN)
        self._ended_by_us.clear()
        self._lost = ""
        self._peers = PeerWatch(
            worker_group.store,
            worker_group.group_rank,
            worker_group.group_world_size,
            Path(os.environ[CONNECTED_FILE]),
            len(ids),
        )
        self.world_size = worker_group.workers[0].world_size
        return ids

    def _stop_workers(self, *args: Any, **options: Any) -> None:
        """Lets what still runs save and end: a machine has come, and the job starts again with its ranks."""
        self._send(signal.SIGTERM)
        processes = [handler.proc for handler in self._pcontext.subprocess_handlers.values()]
        _wait_for(processes, SAVING)
        super()._stop_workers(*args, **options)

    def _hand_on(self, number: int, frame: object) -> None:
        self._asked = True
        self._send(number)

    def _send(self, number: int) -> None:
        for handler in self._pcontext.subprocess_handlers.values():
            if handler.proc.poll() is None:
                os.kill(handler.proc.pid, number)  # not to its group: data workers serve it to the end

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not self._lost and (lost := self._peers.look()):
            self._lost = lost
            self._end(worker_group)
        self._end_survivors(worker_group)
        result = super()._monitor_workers(worker_group)
        waiting = worker_group.spec.rdzv_handler.num_nodes_waiting
        if result.state == WorkerState.SUCCEEDED and not self._asked and waiting():
            return RunResult(WorkerState.HEALTHY)  # stopped by another launcher, for a machine that has come
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            own = {r: f for r, f in result.failures.items() if r not in self._ended_by_us}
            ranks = [worker.global_rank for worker in worker_group.workers]
            files = {rank: self._pcontext.error_files[number] for number, rank in enumerate(ranks)}
            failure = first_failure(own or result.failures, files)
            if self._lost and not own:
                failure = replace(failure, lost=self._lost)
            self._failed(failure, worker_group.group_world_size)
        return result

    def _end_survivors(self, worker_group: WorkerGroup) -> None:
        handlers = self._pcontext.subprocess_handlers
        codes = [handler.proc.poll() for handler in handlers.values()]
        if not any(codes):
            return
        if any(code and -code in CRASHES for code in codes):
            self._let_tell([handler.proc for handler in handlers.values()])
        self._end(worker_group)

    def _end(self, worker_group: WorkerGroup) -> None:
        for local_rank, handler in self._pcontext.subprocess_handlers.items():
            if handler.proc.poll() is None:
                self._ended_by_us.add(worker_group.workers[local_rank].global_rank)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(handler.proc.pid, signal.SIGKILL)

    def _let_tell(self, processes: Sequence[Popen]) -> None:
        """The ranks that are left hand over their last collectives, for one that has died says nothing itself."""
        Path(os.environ[CRASH_FILE]).touch()
        _wait_for(processes, TELLING)

    def _failed(self, failure: Failure, machines: int) -> None:
        self.failures.append(failure)
        if self._asked or (failure.exit_code in REFUSALS and machines == 1):
            self._remaining_restarts = 0
        if self._remaining_restarts:
            again = f"starting again ({len(self.failures)} of {self._worker_group.spec.max_restarts})"
            print(failure.sentence(self.world_size), again, sep="\n", file=sys.stderr)
        else:
            serves_store = self._worker_group.spec.rdzv_handler.serves_store
            self._peers.tell(failure.sentence(), serves_store)


def _wait_for(processes: Sequence[Popen], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)


def build_agent(
    nproc: int,
    command: Sequence[str],
    nnodes: tuple[int, int],
    max_restarts: int,
    rdzv_endpoint: str | None,
    rdzv_id: str | None,
    folder: str,
) -> Agent:
    """An agent that runs `python *command`, with its own files in `folder`; see `launch.launch`."""
    defaults = LaunchConfig(*nnodes, nproc)  # such as which cores are near a GPU
    if nnodes == (1, 1):
        meeting = OneMachine()
    else:
        run_id = rdzv_id or id_of(command, nnodes)
        meeting = SeveralMachines(rdzv_endpoint, run_id, nnodes, **defaults.rdzv_configs)
    spec = WorkerSpec(
        role="rank",
        local_world_size=nproc,
        rdzv_handler=meeting,
        entrypoint=sys.executable,
        args=tuple(command),
        max_restarts=max_restarts,
        monitor_interval=0.1,
        numa_options=defaults.numa_options,
    )
    return Agent(spec, DefaultLogsSpecs(log_dir=folder))
