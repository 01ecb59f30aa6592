"""A subclass of torch's elastic agent whose hooks and attributes are public."""

from __future__ import annotations

from collections.abc import Mapping
from subprocess import Popen
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import (
    SubprocessHandler,
    get_subprocess_handler,
)
from torch.distributed.elastic.rendezvous import RendezvousInfo


class HookedAgent(LocalElasticAgent):
    """An elastic agent whose subclasses may override start_workers, stop_workers and monitor_workers."""

    def start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start this machine's worker processes after a rendezvous. Return an id per local rank."""
        return super()._start_workers(worker_group)

    def stop_workers(self, *args: Any, **options: Any) -> None:
        """Stop the worker processes before a restart."""
        super()._stop_workers(*args, **options)

    def monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of the worker processes. The agent calls it every `monitor_interval` seconds."""
        return super()._monitor_workers(worker_group)

    @property
    def worker_processes(self) -> dict[int, Popen]:
        """The processes of the current attempt, by local rank."""
        return {rank: handler.proc for rank, handler in self._pcontext.subprocess_handlers.items()}

    def worker_failure(self, local_rank: int) -> ProcessFailure:
        """Return the failure of a worker process that has exited."""
        process = self.worker_processes[local_rank]
        return ProcessFailure(local_rank, process.pid, process.returncode, self.error_files[local_rank])

    def worker_environment(self, local_rank: int) -> dict[str, str]:
        """Return the environment variables of a worker that distinguish it from the agent."""
        return dict(self._pcontext.envs[local_rank])

    def start_process(self, local_rank: int, environment: Mapping[str, str]) -> SubprocessHandler:
        """Start another process with a worker's command and variables, and with the additional variables in
        `environment`."""
        context = self._pcontext
        return get_subprocess_handler(
            entrypoint=context.entrypoint,
            args=context.args[local_rank],
            env={**context.envs[local_rank], **environment},
            stdout=context.stdouts[local_rank],
            stderr=context.stderrs[local_rank],
            local_rank_id=local_rank,
            numa_options=context._numa_options,
        )

    def replace_worker(self, worker_group: WorkerGroup, local_rank: int, handler: SubprocessHandler) -> None:
        """Make the process of `handler` the worker in place of one that has exited."""
        self._pcontext.subprocess_handlers[local_rank] = handler
        worker_group.workers[local_rank].id = handler.proc.pid

    def reassign_ranks(self, worker_group: WorkerGroup, info: RendezvousInfo) -> None:
        """Give the running workers the ranks of another rendezvous, without a restart."""
        workers = self._assign_worker_ranks(info.store, info.rank, info.world_size, worker_group.spec)
        for before, worker in zip(worker_group.workers, workers):
            worker.id = before.id
            self._pcontext.envs[worker.local_rank] |= {
                "RANK": str(worker.global_rank),
                "WORLD_SIZE": str(worker.world_size),
                "ROLE_RANK": str(worker.role_rank),
                "ROLE_WORLD_SIZE": str(worker.role_world_size),
                "GROUP_RANK": str(info.rank),
                "GROUP_WORLD_SIZE": str(info.world_size),
            }
        worker_group.workers, worker_group.store = workers, info.store
        worker_group.group_rank, worker_group.group_world_size = info.rank, info.world_size
        self._store = info.store

    def restart_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the workers, meet the other agents and start the workers again."""
        self._restart_workers(worker_group)

    @property
    def error_files(self) -> dict[int, str]:
        """The files in which workers report errors, by local rank."""
        return self._pcontext.error_files

    @property
    def remaining_restarts(self) -> int:
        """Number of restarts that are left. 0 ends the job at the next failure."""
        return self._remaining_restarts

    @remaining_restarts.setter
    def remaining_restarts(self, value: int) -> None:
        self._remaining_restarts = value

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return self.start_workers(worker_group)

    def _stop_workers(self, *args: Any, **options: Any) -> None:
        self.stop_workers(*args, **options)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.monitor_workers(worker_group)
