"""In-process restart: ranks that survive another rank's failure begin again without leaving their processes.

Launcher and ranks communicate through the store that the launcher serves:

    launcher    a rank dies -> announces a new generation -> starts a replacement (agent.py)
    rank        training -> aborted -> meeting -> training

A thread of each rank reads the generation. When it has increased, the thread aborts the rank's collectives, so that
the main thread gets an error from the collective in which it waits. The main thread releases the run, waits until all
ranks have arrived in the newest generation, and connects again. If another rank dies meanwhile, the generation
increases again. If this takes too long, the launcher restarts all processes.

The ranks of a job can restart only after all of them have begun to train.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from megalith.compat.process_groups import abort_nccl_groups, destroy_groups
from megalith.errors import MegalithError, TrainingError
from megalith.launch.failure import RankLost, is_collective_error
from megalith.launch.launcher import Process
from megalith.launch.network import Connections, limited_silence, open_connections, shut_down
from megalith.launch.parent import exit_with_launcher

IN_PROCESS = "MEGALITH_IN_PROCESS"  # environment variable: the launcher replaces ranks
REPLACEMENT = "MEGALITH_REPLACEMENT"  # environment variable: this process replaces a rank
MIN_POLL_INTERVAL = 0.1  # seconds between two reads of the generation
POLLS_PER_SECOND = 5000  # of all ranks together, which one store answers
ANNOUNCEMENT_TIMEOUT = (
    15.0  # seconds after a lost connection in which the launcher announces a new generation
)
LIMIT = 300.0  # seconds from an announcement until all ranks train again
STORE_TIMEOUT = timedelta(seconds=60)


class MeetingError(TrainingError):
    """The ranks of a restart did not all arrive in time. The launcher then restarts all processes."""


class RestartStore:
    """Keys of in-process restarts in the job's store, as launchers and ranks use them.

    Args:
        store: a connection that only one thread uses.
        world_size: ranks of the job.
    """

    def __init__(self, store: Store, world_size: int):
        self._store, self._world_size = PrefixStore("in-process restart", store), world_size

    def generation(self) -> int:
        """Return the number of restarts so far."""
        return self._store.add("generation", 0)

    def announce(self) -> int:
        """Begin the next generation and return its number."""
        return self._store.add("generation", 1)

    def arrive(self, generation: int) -> None:
        self._store.add(f"arrived/{generation}", 1)

    def all_arrived(self, generation: int) -> bool:
        return self._store.add(f"arrived/{generation}", 0) >= self._world_size

    def begin_training(self, generation: int) -> None:
        self._store.add(f"training/{generation}", 1)

    def all_train(self, generation: int) -> bool:
        """Return True if all ranks have begun to train in this generation."""
        return self._store.add(f"training/{generation}", 0) >= self._world_size

    def request_replacement(self, generation: int, ranks: Sequence[int]) -> None:
        """Ask the launchers to kill and replace ranks that hang."""
        self._store.set(f"hanging/{generation}", json.dumps(sorted(ranks)))

    def requested(self, generation: int) -> list[int]:
        """Return the ranks for which a replacement is requested in this generation."""
        key = f"hanging/{generation}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else []

    def plan_replacement(self, rank: int) -> bool:
        """Return True for the first plan to replace a rank of the job."""
        return self._store.add(f"planned/{rank}", 1) == 1

    def request_planned_replacement(self, generation: int, ranks: Sequence[int]) -> None:
        """Ask the launchers to replace ranks that work, if a restart is left."""
        self._store.set(f"unhealthy/{generation}", json.dumps(sorted(ranks)))

    def planned(self, generation: int) -> list[int]:
        """Return the ranks for which a planned replacement is requested in this generation."""
        key = f"unhealthy/{generation}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else []

    def groups_store(self, generation: int) -> Store:
        """Return the store for the process groups of a generation."""
        return PrefixStore(f"groups/{generation}", self._store)


def open_restart_store(host: str, port: int, world_size: int) -> RestartStore:
    """Connect to the job's store."""
    with limited_silence(STORE_TIMEOUT.total_seconds()):
        store = TCPStore(host, port, timeout=STORE_TIMEOUT, wait_for_workers=False)
    return RestartStore(store, world_size)


class InProcessRestart:
    """Context manager of a rank that can restart in its process; the launcher's counterpart is in agent.py.

    Args:
        process: this process's ranks.
        is_wanted: the run supports it and keeps snapshots in memory.

    Attributes:
        is_active: False if the run does not want it or the launcher does not replace ranks.
        generation: number of restarts that this rank has taken part in.
        is_replacement: True if this process replaces another one and has not trained yet.
    """

    def __init__(self, process: Process, is_wanted: bool):
        self._process = process
        self.is_active = is_wanted and process.world_size > 1 and os.environ.get(IN_PROCESS) == "1"
        self.is_replacement = os.environ.pop(REPLACEMENT, None) is not None
        self.generation = 0
        self._aborted, self._stopped, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._before: Connections = set()
        self._during: Connections | None = None

    def __enter__(self) -> InProcessRestart:
        if self.is_active:
            exit_with_launcher()
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = (
                "0"  # torch would end the process instead of aborting
            )
            self._store, store = self._connect(), self._connect()
            self._before = open_connections()
            self._thread = threading.Thread(
                target=self._watch, args=(store,), name="in-process restart", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def _connect(self) -> RestartStore:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return open_restart_store(host, port, self._process.world_size)

    def is_aborted(self) -> bool:
        """Return True if this rank's collectives have been aborted since the last `meet`."""
        return self._aborted.is_set()

    def meet(self) -> Store | None:
        """Wait for all ranks of the newest generation.

        Returns:
            The store for this generation's process groups. None for the first generation, which connects like a job
            without in-process restarts.

        Raises:
            MeetingError: not all ranks arrive within LIMIT seconds, or the launcher has ended.
        """
        if not self.is_active:
            return None
        try:
            newest = self._wait_for_arrivals()
        except RuntimeError as error:  # torch's store errors
            raise MeetingError(f"the job's store does not answer: {error}") from error
        with self._lock:
            self.generation, self._before, self._during = newest, open_connections(), None
            self._aborted.clear()
        return self._connect_groups() if newest else None

    def _wait_for_arrivals(self) -> int:
        arrived, deadline = 0, time.monotonic() + LIMIT
        while (newest := self._store.generation()) and not (
            newest == arrived and self._store.all_arrived(newest)
        ):
            if newest > arrived:
                self._store.arrive(newest)
                arrived = newest
            if time.monotonic() > deadline:
                raise MeetingError(f"not all ranks have arrived within {LIMIT:g} s of the restart")
            time.sleep(0.02)
        return newest

    def _connect_groups(self) -> Store:
        """Open a store connection for the process groups only. An abort shuts it down with the groups' connections."""
        return self._connect().groups_store(self.generation)

    def connected(self) -> None:
        """Record that all process groups have been created."""
        with self._lock:
            self._during = open_connections()

    def begin_training(self) -> None:
        """Record that this rank begins to train. From now on it can restart."""
        self.is_replacement = False
        if self.is_active:
            self._store.begin_training(self.generation)

    def request_replacement(self, ranks: Sequence[int]) -> None:
        """Ask the launchers to replace ranks that hang. Called from a thread of its own."""
        self._connect().request_replacement(self.generation, ranks)

    def plan_replacement(self, rank: int) -> bool:
        """Return True unless a replacement of this rank has been planned before."""
        return self._store.plan_replacement(rank)

    def request_planned_replacement(self, ranks: Sequence[int]) -> None:
        """Ask the launchers to replace ranks that work."""
        self._store.request_planned_replacement(self.generation, ranks)

    def wait_for_abort(self) -> bool:
        """Wait until the launcher has announced a new generation. Return False if it does not."""
        return self._aborted.wait(ANNOUNCEMENT_TIMEOUT)

    def survives(self, error: BaseException) -> bool:
        """Return True if `error` is the consequence of another rank's failure and the launcher replaces that rank."""
        if not self.is_active:
            return False
        if isinstance(error, MegalithError) and not isinstance(error, RankLost):
            return self._aborted.is_set() and not isinstance(error, MeetingError)
        return self._aborted.wait(ANNOUNCEMENT_TIMEOUT if is_collective_error(error) else 0)

    def release(self) -> None:
        """Destroy the process groups, after the last reference to the run has been dropped."""
        gc.collect()
        destroy_groups()
        gc.collect()

    def _watch(self, store: RestartStore) -> None:
        interval = max(MIN_POLL_INTERVAL, self._process.world_size / POLLS_PER_SECOND)
        while not self._stopped.wait(interval):
            try:
                newest = store.generation()
            except RuntimeError:  # the launcher has exited; it takes this process with it
                return
            with self._lock:
                if newest > self.generation and not self._aborted.is_set():
                    self._abort()

    def _abort(self) -> None:
        """Make every collective of this rank end. gloo's groups have no abort, so their connections are shut down."""
        self._aborted.set()
        if self._process.is_first and not self.is_replacement:
            print("a rank has failed; restarting in the same processes", file=sys.stderr, flush=True)
        abort_nccl_groups()
        during = open_connections() if self._during is None else self._during
        shut_down(during - self._before)
