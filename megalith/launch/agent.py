"""The launcher process: torch's elastic agent, extended for training jobs.

The agent starts this machine's processes, watches them, and after a failure meets the other machines in a new
rendezvous and restarts the processes, with the ranks that remain. In addition, this subclass

- passes stop signals on to its processes and gives them time to save;
- replaces a failed rank if the others can restart in their processes (in_process.py);
- continues with the ranks of the machines that remain or have joined, in the same processes;
- otherwise kills the other ranks as soon as one has failed, because they could only wait for it;
- kills its ranks if they are still connecting when another machine is lost;
- does not restart a job that exited with a configuration, data or checkpoint error, which would recur;
- keeps the first failure, which is more informative than the failures of later attempts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.launcher.api import LaunchConfig

from megalith.compat.elastic import HookedAgent
from megalith.errors import REFUSALS, HangError
from megalith.launch.failure import CRASH_FILE, CRASHES, Failure, first_failure, stopped_rank
from megalith.launch.in_process import IN_PROCESS, RESIZES
from megalith.launch.peer_watch import CONNECTED_FILE, PeerWatch
from megalith.launch.rank_replacement import UNEXPECTED, RankReplacement, replacement_variables
from megalith.launch.rendezvous import (
    Membership,
    MultiNodeRendezvous,
    SingleNodeRendezvous,
    default_run_id,
)
from megalith.launch.restart_store import LOST, open_restart_store
from megalith.launch.signals import STOP_SIGNALS, handled_stop_signals
from megalith.launch.spare import SPARE, assign
from megalith.launch.stops import STOP_CODE_FILE
from megalith.tables import counted

KILL_TIMEOUT = 5.0  # seconds for a killed process to end
CRASH_REPORT_TIMEOUT = 3.0  # seconds for the other ranks to report their last collectives after a crash
SAVE_TIMEOUT = 60.0  # seconds for ranks to save and exit when a machine has joined
RESIZE_INTERVAL = 1.0  # seconds between checks for lost and waiting machines


class Agent(HookedAgent):
    """Elastic agent. `run` returns once the job has succeeded or failed permanently.

    Attributes:
        failures: first failure on this machine of each failed attempt.
        world_size: ranks of the whole job in its last attempt.
        job: unique name of this job, the same on all machines.
    """

    def __init__(self, spec: WorkerSpec, logs_specs: LogsSpecs, num_spares: int = 0):
        super().__init__(spec, logs_specs)
        self.failures: list[Failure] = []
        self.world_size = spec.local_world_size
        self.job = spec.rdzv_handler.job
        self._stop_requested = False
        self._handled_signals = handled_stop_signals()
        self._killed_ranks: set[int] = set()  # ended because another rank had failed
        self._stopped_ranks: dict[int, Failure] = {}  # ended because they hang or are unhealthy
        self._num_spares = num_spares
        self._free_devices: list[int] = []  # GPUs that no rank has used in this attempt
        self._devices: dict[int, int] = {}  # by local rank, of replacements that got one of them
        self._spares: dict[Path, SubprocessHandler] = {}  # by the file that assigns a rank to each

    def start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for name in (STOP_CODE_FILE, CRASH_FILE, CONNECTED_FILE):  # of the last attempt
            Path(os.environ[name]).unlink(missing_ok=True)
        handler = worker_group.spec.rdzv_handler
        joins = handler.running is not None
        os.environ[IN_PROCESS] = str(int(joins or self.remaining_restarts > 0))
        os.environ.pop(RESIZES, None)
        if handler.is_elastic:
            handler.hides_waiting = False
            os.environ[RESIZES] = str(handler.running.resizes + 1 if joins else 0)
        ids = super().start_workers(worker_group)
        for number in STOP_SIGNALS:  # elastic's handlers would override what `nohup` makes us ignore
            signal.signal(number, self._forward_signal if number in self._handled_signals else signal.SIG_IGN)
        self._killed_ranks.clear()
        self._stopped_ranks.clear()
        self._watch_peers(worker_group)
        self.world_size = worker_group.workers[0].world_size
        self._replacement, self._resize_check_at = None, 0.0
        if joins or (self.remaining_restarts and (self.world_size > 1 or handler.is_elastic)):
            address = worker_group.master_addr, worker_group.master_port
            self._replacement = RankReplacement(open_restart_store(*address, self.world_size))
            self._free_devices = list(range(len(ids), torch.cuda.device_count()))
            self._devices.clear()
            self._start_spares()
        return ids

    def _watch_peers(self, worker_group: WorkerGroup) -> None:
        """Watch the other machines until this machine's ranks are connected."""
        group_rank, machines = worker_group.group_rank, worker_group.group_world_size
        connected = Path(os.environ[CONNECTED_FILE])
        self._not_connected = ""
        self._peers = PeerWatch(
            worker_group.store, group_rank, machines, connected, len(worker_group.workers)
        )

    def stop_workers(self, *args: Any, **options: Any) -> None:
        """Let running workers save and exit before a restart with the ranks of a machine that has joined."""
        self._send(signal.SIGTERM)
        _wait_for(list(self.worker_processes.values()), SAVE_TIMEOUT)
        super().stop_workers(*args, **options)

    def _forward_signal(self, number: int, frame: object) -> None:
        self._stop_requested = True
        self._send(number)

    def _send(self, number: int) -> None:
        for process in self.worker_processes.values():
            if process.poll() is None:
                os.kill(process.pid, number)  # not to its process group: it still needs its data workers

    def monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        handler = worker_group.spec.rdzv_handler
        if handler.is_elastic and worker_group.group_rank == 0:
            handler.announce()
        if not self._not_connected and (reason := self._peers.poll()):
            self._not_connected = reason
            self._kill_ranks(worker_group)
        if self._resize(worker_group):
            return RunResult(WorkerState.HEALTHY)
        self._seen_codes: list[int | None] | None = None
        if self._replace_ranks(worker_group):
            return RunResult(WorkerState.HEALTHY)
        if self._seen_codes is not None and self._exit_codes() != self._seen_codes:
            return RunResult(WorkerState.HEALTHY)  # a rank has failed since; the next call replaces it
        self._kill_survivors(worker_group)
        result = super().monitor_workers(worker_group)
        if result.state == WorkerState.SUCCEEDED and not self._stop_requested and handler.num_nodes_waiting():
            return RunResult(
                WorkerState.HEALTHY
            )  # another launcher stopped the ranks because a machine joined
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            failures = {r: f for r, f in result.failures.items() if r not in self._killed_ranks}
            failure = first_failure(failures or result.failures, self._error_files_by_rank(worker_group))
            failure = self._stopped_ranks.get(failure.rank, failure)
            if self._not_connected and not failures:
                failure = replace(failure, not_connected=self._not_connected)
            self._record_failure(failure, worker_group.group_world_size)
        return result

    def _exit_codes(self) -> list[int | None]:
        return [self.worker_processes[local].poll() for local in range(len(self.worker_processes))]

    def _error_files_by_rank(self, worker_group: WorkerGroup) -> dict[int, str]:
        ranks = [worker.global_rank for worker in worker_group.workers]
        return {rank: self.error_files[number] for number, rank in enumerate(ranks)}

    def _replace_ranks(self, worker_group: WorkerGroup) -> bool:
        """Replace the ranks that have failed. Return False if there are none, or if all ranks of the job must be
        restarted."""
        if self._replacement is None or self._not_connected or self._stop_requested:
            return False
        try:
            return self._replace_ranks_of(worker_group, self._replacement)
        except RuntimeError:  # the ranks' store has ended with the launcher that served it
            return False

    def _replace_ranks_of(self, worker_group: WorkerGroup, replacement: RankReplacement) -> bool:
        workers = worker_group.workers
        self._stop_requested_ranks(worker_group, replacement)
        codes = self._seen_codes = self._exit_codes()
        failed = [local for local, code in enumerate(codes) if code]
        if not failed:
            if not replacement.follow():
                reason = "the ranks did not all train again in time after a failure"
                self._record_stops([w.global_rank for w in workers], reason, HangError.exit_code)
                self._replacement = None  # until all processes have started again
                self._kill_ranks(worker_group)
            return False
        failures = {workers[local].global_rank: self.worker_failure(local) for local in failed}
        failure = first_failure(failures, self._error_files_by_rank(worker_group))
        stopped = self._stopped_ranks.get(failure.rank)
        if not self.remaining_restarts or not replacement.is_possible(codes, None if stopped else failure):
            return False
        failure = stopped or failure
        self.failures.append(failure)
        self.remaining_restarts -= 1
        count = len(self.failures)
        replaced = ", ".join(map(str, failures))
        limit = worker_group.spec.max_restarts
        print(failure.message(), f"replacing rank {replaced} ({count} of {limit})", sep="\n", file=sys.stderr)
        replacement.begin()
        for local in failed:
            self._kill([local])  # the rest of its process group
            self._stopped_ranks.pop(workers[local].global_rank, None)
            Path(self.error_files[local]).unlink(missing_ok=True)
            self.replace_worker(worker_group, local, self._next_process(local, replacement_variables(count)))
        self._start_spares()
        return True

    def _stop_requested_ranks(self, worker_group: WorkerGroup, replacement: RankReplacement) -> None:
        """Kill ranks of this machine whose replacement is requested: hanging ones and, while restarts are left, those
        with unhealthy hardware.
        """
        ranks = {worker.global_rank: local for local, worker in enumerate(worker_group.workers)}
        unhealthy = ranks.keys() & (replacement.planned() if self.remaining_restarts else [])
        hanging = ranks.keys() & replacement.requested()
        self._record_stops(unhealthy, "its hardware is unhealthy", UNEXPECTED)
        self._record_stops(hanging, "it made no progress", HangError.exit_code)
        victims = [ranks[rank] for rank in unhealthy | hanging]
        self._kill(victims)
        _wait_for([self.worker_processes[local] for local in victims], KILL_TIMEOUT)

    def _record_stops(self, ranks: Collection[int], reason: str, exit_code: int) -> None:
        """Record why ranks are stopped. This reason is printed instead of the message that a process was killed."""
        self._stopped_ranks |= {rank: stopped_rank(rank, reason, exit_code) for rank in ranks}

    def _resize(self, worker_group: WorkerGroup) -> bool:
        """Continue with other machines if some are lost or have joined. Return True if the workers have changed."""
        handler, now = worker_group.spec.rdzv_handler, time.monotonic()
        if not handler.is_elastic or self._replacement is None or now < self._resize_check_at:
            return False
        self._resize_check_at = now + RESIZE_INTERVAL
        if self._not_connected or self._stop_requested:
            return False
        try:
            reason = self._resize_reason(worker_group, self._replacement)
            if not reason or (reason == LOST and not self.remaining_restarts):
                return False
            before = self._replacement.begin_resize(reason)
        except RuntimeError:  # the ranks' store has ended with the launcher that served it
            return False
        if reason == LOST:
            self.remaining_restarts -= 1
        lost, left = "a machine does not answer", self.remaining_restarts
        text = "machines join"
        if reason == LOST:
            text = f"{lost}; continuing on the others ({counted(left, 'restart')} left)"
        print(text, file=sys.stderr, flush=True)
        group_rank, address = worker_group.group_rank, worker_group.master_addr
        info = handler.resize(Membership(group_rank, address, worker_group.master_port, before))
        if info is None:
            self._kill_ranks(worker_group)
            self.restart_workers(worker_group)
            return True
        self._continue_with(worker_group, info, self._replacement)
        return True

    def _resize_reason(self, worker_group: WorkerGroup, replacement: RankReplacement) -> str:
        handler = worker_group.spec.rdzv_handler
        handler.hides_waiting = replacement.has_trained()
        if not handler.hides_waiting:
            return ""
        if worker_group.group_rank == 0:
            replacement.invite(self.world_size + handler.waiting() * len(worker_group.workers))
        return replacement.resize_reason()

    def _continue_with(
        self, worker_group: WorkerGroup, info: RendezvousInfo, replacement: RankReplacement
    ) -> None:
        """Continue with the machines of a rendezvous in the same processes."""
        members = worker_group.spec.rdzv_handler.members
        before = [worker.global_rank for worker in worker_group.workers]
        self.reassign_ranks(worker_group, info)
        Path(os.environ[CONNECTED_FILE]).unlink(missing_ok=True)
        self._watch_peers(worker_group)
        os.environ[RESIZES] = str(int(os.environ[RESIZES]) + 1)
        self.world_size = worker_group.workers[0].world_size
        replacement.set_world_size(self.world_size)
        ranks = list(zip(before, (worker.global_rank for worker in worker_group.workers)))
        info.store.set(f"megalith/continues/{info.rank}", json.dumps(ranks))
        if info.rank == 0:
            everyone = [info.store.get(f"megalith/continues/{rank}") for rank in range(members)]
            replacement.finish_resize(
                self.world_size, dict(pair for each in everyone for pair in json.loads(each))
            )
            ranks_now, machines = counted(self.world_size, "rank"), counted(info.world_size, "machine")
            print(f"continuing with {ranks_now} on {machines}", file=sys.stderr)

    def _next_process(self, local_rank: int, variables: Mapping[str, str]) -> SubprocessHandler:
        """Return a process for this rank: a spare, if there is one, otherwise a new process.

        It gets a GPU that no rank has used, if possible.
        """
        if self._free_devices:
            self._devices[local_rank] = self._free_devices.pop(0)
        if local_rank in self._devices:
            variables = {**variables, "LOCAL_RANK": str(self._devices[local_rank])}
        while self._spares:
            path, handler = self._spares.popitem()
            if handler.proc.poll() is None:
                assign(path, {**self.worker_environment(local_rank), **variables})
                return handler
        return self.start_process(local_rank, variables)

    def _start_spares(self) -> None:
        """Start processes until there are as many spares as configured. If the system does not allow more, the job
        continues with fewer.
        """
        local_rank = len(self.worker_processes) - 1  # not that of rank 0, which prints while it starts
        while len(self._spares) < self._num_spares:
            path = Path(os.environ[CRASH_FILE]).with_name(f"spare_{uuid.uuid4().hex}")
            try:
                self._spares[path] = self.start_process(local_rank, {SPARE: str(path)})
            except OSError as error:
                print(f"warning: a spare process cannot be started: {error.strerror}", file=sys.stderr)
                return

    def stop_spares(self) -> None:
        """Kill the spares, at the end of the job."""
        for handler in self._spares.values():
            if handler.proc.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(handler.proc.pid, signal.SIGKILL)
            handler.proc.wait()
        self._spares.clear()

    def _kill(self, local_ranks: Sequence[int]) -> None:
        for local in local_ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.worker_processes[local].pid, signal.SIGKILL)

    def _kill_survivors(self, worker_group: WorkerGroup) -> None:
        processes = list(self.worker_processes.values())
        codes = [process.poll() for process in processes]
        if not any(codes):
            return
        if any(code and -code in CRASHES for code in codes):
            self._collect_last_collectives(processes)
        self._kill_ranks(worker_group)

    def _kill_ranks(self, worker_group: WorkerGroup) -> None:
        for local_rank, process in self.worker_processes.items():
            if process.poll() is None:
                self._killed_ranks.add(worker_group.workers[local_rank].global_rank)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _collect_last_collectives(self, processes: Sequence[Popen]) -> None:
        """Make the remaining ranks report their last collectives, because a crashed rank reports nothing."""
        Path(os.environ[CRASH_FILE]).touch()
        _wait_for(processes, CRASH_REPORT_TIMEOUT)

    def _record_failure(self, failure: Failure, machines: int) -> None:
        self.failures.append(failure)
        if self._stop_requested or (failure.exit_code in REFUSALS and machines == 1):
            self.remaining_restarts = 0
        if self.remaining_restarts:
            restart = f"restarting ({len(self.failures)} of {self.get_worker_group().spec.max_restarts})"
            print(failure.message(self.world_size), restart, sep="\n", file=sys.stderr)
        else:
            serves_store = self.get_worker_group().spec.rdzv_handler.serves_store
            self._peers.publish_failure(failure.message(), serves_store)


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
    spares: int = 0,
) -> Agent:
    """Build an agent that runs `python *command` and keeps its files in `folder`. The arguments are those of
    `launch`.
    """
    defaults = LaunchConfig(*nnodes, nproc)  # torch's, such as NUMA binding
    if nnodes == (1, 1):
        handler = SingleNodeRendezvous()
    else:
        run_id = rdzv_id or default_run_id(command, nnodes)
        handler = MultiNodeRendezvous(rdzv_endpoint, run_id, nnodes, **defaults.rdzv_configs)
    spec = WorkerSpec(
        role="rank",
        local_world_size=nproc,
        rdzv_handler=handler,
        entrypoint=sys.executable,
        args=tuple(command),
        max_restarts=max_restarts,
        monitor_interval=0.1,
        numa_options=defaults.numa_options,
    )
    return Agent(spec, DefaultLogsSpecs(log_dir=folder), spares)
