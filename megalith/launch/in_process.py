"""In-process restart: ranks that survive another rank's failure restart training without exiting.

Launcher and ranks communicate through the store that the launcher serves:

    launcher    a rank dies -> announces a new generation -> starts a replacement (agent.py)
    rank        training -> aborted -> meeting -> training

The generation is the number of restarts so far. A thread of each rank reads it. When it has increased, the thread
aborts the rank's collectives, so that the main thread gets an error from the collective in which it waits. The main
thread releases the run, waits until all ranks have arrived in the newest generation, and connects again. If another
rank dies meanwhile, the generation increases again. If this takes too long, the launcher restarts all processes.

The ranks of a job can restart only after all of them have begun to train. In an elastic job, their number may change
(restart_store.py).
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from torch.distributed import Store

from megalith.compat.process_groups import abort_nccl_groups, destroy_groups
from megalith.errors import MegalithError, TrainingError
from megalith.launch.failure import RankLost, is_collective_error
from megalith.launch.launcher import Process
from megalith.launch.network import Connections, open_connections, shut_down
from megalith.launch.parent import exit_with_launcher
from megalith.launch.restart_store import JOINED, RestartStore, open_restart_store

IN_PROCESS = "MEGALITH_IN_PROCESS"  # environment variable: the launcher replaces ranks
REPLACEMENT = "MEGALITH_REPLACEMENT"  # environment variable: this process replaces a rank
RESIZES = "MEGALITH_RESIZES"  # environment variable of an elastic job: resizes before this process started
MIN_POLL_INTERVAL = 0.1  # seconds between two reads of the generation
POLLS_PER_SECOND = 5000  # of all ranks together, which one store answers
ANNOUNCEMENT_TIMEOUT = (
    15.0  # seconds after a lost connection in which the launcher announces a new generation
)
LOST_RANKS_DELAY = 2.0  # seconds after a lost connection in which a launcher replaces a rank of its machine
LIMIT = 300.0  # seconds from an announcement until all ranks train again


class MeetingError(TrainingError):
    """Raised if not all ranks of a restart arrive in time. The launcher then restarts all processes."""


class InProcessRestart:
    """Context manager for a rank that can restart in its process. agent.py has the launcher's counterpart.

    Args:
        process: this process's ranks.
        is_wanted: the run supports in-process restarts and keeps snapshots in memory.

    Attributes:
        process: this process's ranks, which change if the job is resized.
        is_active: False if the run does not want in-process restarts or the launcher does not replace ranks.
        is_elastic: True if the number of ranks may change.
        generation: number of restarts that this rank has taken part in.
        is_replacement: True if this process replaces another one and has not trained yet.
    """

    def __init__(self, process: Process, is_wanted: bool):
        self.process = process
        self.is_elastic = bool(os.environ.get(RESIZES))
        self._resizes = int(os.environ.get(RESIZES) or 0)
        several = process.world_size > 1 or self.is_elastic
        self.is_active = is_wanted and several and os.environ.get(IN_PROCESS) == "1"
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
        return open_restart_store(host, port, self.process.world_size)

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
        while newest := self._store.generation():
            if (
                not self.is_elastic or not self._store.resize_reason()
            ):  # read after the generation it announces
                self._follow_resizes()
                if newest == arrived and self._store.all_arrived(newest):
                    break
                if newest > arrived:
                    self._store.arrive(newest)
                    arrived = newest
            else:
                deadline = time.monotonic() + LIMIT  # the launchers may wait for more machines
            if time.monotonic() > deadline:
                raise MeetingError(f"not all ranks have arrived within {LIMIT:g} s of the restart")
            time.sleep(0.02)
        return newest

    def _follow_resizes(self) -> None:
        """Apply all resizes since the last call by updating this process's rank and world size.

        Raises MeetingError if the job continues without this process.
        """
        while self.is_elastic and self._resizes < self._store.resizes():
            self._resizes += 1
            world_size, ranks = self._store.resized_ranks(self._resizes)
            if self.process.rank not in ranks:
                raise MeetingError("the other machines continue without this one")
            self.process = replace(self.process, rank=ranks[self.process.rank], world_size=world_size)
            self._store.world_size = world_size
            os.environ |= {"RANK": str(self.process.rank), "WORLD_SIZE": str(world_size)}

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
        """Ask the launchers to replace ranks that hang. The hang watch's thread calls this."""
        self._connect().request_replacement(self.generation, ranks)

    def plan_replacement(self, rank: int) -> bool:
        """Record that the replacement of this rank is planned. Return False if it was planned before."""
        return self._store.plan_replacement(rank)

    def request_planned_replacement(self, ranks: Sequence[int]) -> None:
        """Ask the launchers to replace ranks that still work, such as unhealthy ones."""
        self._store.request_planned_replacement(self.generation, ranks)

    def invited(self) -> int:
        """Return the number of ranks that the job would have if the waiting machines joined."""
        return self._store.invited()

    def request_resize(self) -> None:
        """Ask the launchers to let the waiting machines join."""
        self._store.request_resize(self.generation)

    def wait_for_abort(self) -> bool:
        """Wait until the launcher announces a new generation. Return False if it does not do so in time."""
        return self._aborted.wait(ANNOUNCEMENT_TIMEOUT)

    def survives(self, error: BaseException) -> bool:
        """Return True if `error` is the consequence of another rank's failure and the launcher replaces that rank."""
        if not self.is_active:
            return False
        if isinstance(error, MegalithError) and not isinstance(error, RankLost):
            return self._aborted.is_set() and not isinstance(error, MeetingError)
        if not is_collective_error(error):
            return self._aborted.is_set()
        if self.is_elastic and not self._aborted.wait(LOST_RANKS_DELAY):
            try:
                self._store.report_lost_ranks(self.generation)
            except RuntimeError:  # the launcher that serves the store is lost
                return self._aborted.is_set()
        return self._aborted.wait(ANNOUNCEMENT_TIMEOUT)

    def release(self) -> None:
        """Destroy the process groups, after the last reference to the run has been dropped."""
        gc.collect()
        destroy_groups()
        gc.collect()

    def _watch(self, store: RestartStore) -> None:
        interval = max(MIN_POLL_INTERVAL, self.process.world_size / POLLS_PER_SECOND)
        while not self._stopped.wait(interval):
            try:
                newest = store.generation()
            except RuntimeError:  # the launcher has exited; it takes this process with it
                return
            with self._lock:
                if newest > self.generation and not self._aborted.is_set():
                    grows = self.is_elastic and store.resize_reason() == JOINED
                    self._abort(has_failed=not grows)

    def _abort(self, has_failed: bool) -> None:
        """End every collective of this rank. gloo's groups cannot be aborted, so their connections are shut down
        instead.
        """
        self._aborted.set()
        if has_failed and self.process.is_first and not self.is_replacement:
            print("a rank has failed; restarting in the same processes", file=sys.stderr, flush=True)
        abort_nccl_groups()
        during = open_connections() if self._during is None else self._during
        shut_down(during - self._before)
