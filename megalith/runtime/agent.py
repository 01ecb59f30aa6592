"""The launcher's own process: torch's elastic agent, and what a training job needs of it besides.

The agent starts this machine's processes, watches them, and after a failure meets the other machines again and starts
them anew, with as many ranks as there are then. Here it also

- hands stop signals on to its processes and lets them take their time, which a checkpoint needs;
- ends the other ranks at once when one has failed: all that they could do is wait for it;
- starts nothing again that was refused with a reason: it would be refused again;
- keeps the first failure, which tells more than those of the attempts after it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from typing import Any

import torch.distributed.elastic.rendezvous.registry as rendezvous
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.launcher.api import LaunchConfig

from megalith.errors import REFUSALS
from megalith.runtime.failure import Failure, first_failure
from megalith.runtime.signals import STOP_SIGNALS, heeded

LAST_CALL = 10  # seconds that machines wait for more to come when there are as many as are needed


class Agent(LocalElasticAgent):
    """`run` returns when the job is done or has failed for good."""

    def __init__(self, spec: WorkerSpec, logs_specs: LogsSpecs):
        super().__init__(spec, logs_specs)
        self.failures: list[Failure] = []
        """What failed first on this machine in each attempt that did not go well."""
        self.world_size = spec.local_world_size
        """Ranks of the whole job in its last attempt."""
        self._asked = False
        self._heeded = heeded()
        self._ended_by_us: set[int] = set()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ids = super()._start_workers(worker_group)
        for number in STOP_SIGNALS:  # elastic's own handlers take over what `nohup` has us ignore
            signal.signal(number, self._hand_on if number in self._heeded else signal.SIG_IGN)
        self._ended_by_us.clear()
        self.world_size = worker_group.workers[0].world_size
        return ids

    def _hand_on(self, number: int, frame: object) -> None:
        self._asked = True
        for handler in self._pcontext.subprocess_handlers.values():
            if handler.proc.poll() is None:
                os.kill(handler.proc.pid, number)  # not to its group: data workers serve it to the end

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._end_survivors(worker_group)
        result = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            own = {r: f for r, f in result.failures.items() if r not in self._ended_by_us}
            self._failed(first_failure(own or result.failures), worker_group.group_world_size)
        return result

    def _end_survivors(self, worker_group: WorkerGroup) -> None:
        handlers = self._pcontext.subprocess_handlers
        if not any(handler.proc.poll() for handler in handlers.values()):
            return
        for local_rank, handler in handlers.items():
            if handler.proc.poll() is None:
                self._ended_by_us.add(worker_group.workers[local_rank].global_rank)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(handler.proc.pid, signal.SIGKILL)

    def _failed(self, failure: Failure, machines: int) -> None:
        self.failures.append(failure)
        if self._asked or (failure.exit_code in REFUSALS and machines == 1):
            self._remaining_restarts = 0
        if self._remaining_restarts:
            again = f"starting again ({len(self.failures)} of {self._worker_group.spec.max_restarts})"
            print(failure.tell(self.world_size), again, sep="\n", file=sys.stderr)


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
    alone = rdzv_endpoint is None
    address = "127.0.0.1" if alone else None
    defaults = LaunchConfig(*nnodes, nproc)  # such as which cores are near a GPU
    meeting = RendezvousParameters(
        "c10d",
        rdzv_endpoint or "127.0.0.1:0",
        rdzv_id or (uuid.uuid4().hex if alone else "megalith"),
        *nnodes,
        local_addr=address,
        last_call_timeout=LAST_CALL,
        **defaults.rdzv_configs,
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=nproc,
        rdzv_handler=rendezvous.get_rendezvous_handler(meeting),
        entrypoint=sys.executable,
        args=tuple(command),
        max_restarts=max_restarts,
        monitor_interval=0.1,
        local_addr=address,
        numa_options=defaults.numa_options,
    )
    return Agent(spec, DefaultLogsSpecs(log_dir=folder))
