"""torch's elastic agent with public hooks and attributes."""

from __future__ import annotations

from subprocess import Popen
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent


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
