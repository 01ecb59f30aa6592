"""Contract of torch's elastic agent: its hooks are called, and its attributes exist."""

import json
import sys
from types import SimpleNamespace

from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from megalith.compat.elastic import HookedAgent
from megalith.launch.rendezvous import SingleNodeRendezvous


class Recorded(HookedAgent):
    calls: list[str]

    def start_workers(self, worker_group):
        self.calls.append("start")
        return super().start_workers(worker_group)

    def stop_workers(self, *args, **options):
        self.calls.append("stop")
        super().stop_workers(*args, **options)

    def monitor_workers(self, worker_group) -> RunResult:
        self.calls.append("monitor")
        assert [process.args[0] for process in self.worker_processes.values()] == [sys.executable]
        assert [*self.error_files] == [0] and self.remaining_restarts == 1 - self.calls.count("stop")
        return super().monitor_workers(worker_group)


def run(code: str, folder) -> tuple[Recorded, RunResult]:
    spec = WorkerSpec(
        role="rank",
        local_world_size=1,
        rdzv_handler=SingleNodeRendezvous(),
        entrypoint=sys.executable,
        args=("-c", code),
        max_restarts=1,
        monitor_interval=0.05,
    )
    agent = Recorded(spec, DefaultLogsSpecs(log_dir=str(folder)))
    agent.calls = []
    return agent, agent.run()


def test_the_agent_calls_the_hooks(tmp_path):
    agent, result = run("pass", tmp_path)
    assert result.state is WorkerState.SUCCEEDED
    assert agent.calls[0] == "start" and "monitor" in agent.calls and agent.calls.count("start") == 1


def test_the_agent_restarts_as_often_as_restarts_remain(tmp_path):
    agent, result = run("raise SystemExit(3)", tmp_path)
    assert result.is_failed() and agent.calls.count("start") == 2 and agent.remaining_restarts == 0


def test_no_restart_follows_if_none_remains(tmp_path, monkeypatch):
    monitor = Recorded.monitor_workers

    def give_up(self, worker_group) -> RunResult:
        result = monitor(self, worker_group)
        if result.state is WorkerState.FAILED:
            self.remaining_restarts = 0
        return result

    monkeypatch.setattr(Recorded, "monitor_workers", give_up)
    agent, result = run("raise SystemExit(3)", tmp_path)
    assert result.is_failed() and agent.calls.count("start") == 1


def test_running_workers_get_the_ranks_of_another_rendezvous(tmp_path, monkeypatch):
    monitor = Recorded.monitor_workers

    def reassign(self, worker_group) -> RunResult:
        if self.calls.count("monitor") == 0:
            process, store = worker_group.workers[0].id, HashStore()
            store.set("torchelastic/assigned_ranks/1", json.dumps([3, 4, 3, 4]))
            address = RendezvousStoreInfo("127.0.0.1", 1)
            self.reassign_ranks(worker_group, RendezvousInfo(store, 1, 2, address))
            (worker,) = worker_group.workers
            assert (worker.id, worker.global_rank, worker.world_size) == (process, 3, 4)
            assert (worker_group.group_rank, worker_group.group_world_size) == (1, 2)
            environment = self.worker_environment(0)
            assert (environment["RANK"], environment["WORLD_SIZE"], environment["GROUP_RANK"]) == (
                "3",
                "4",
                "1",
            )
            self._exit_barrier = lambda: None  # no other agent arrives
        return monitor(self, worker_group)

    monkeypatch.setattr(Recorded, "monitor_workers", reassign)
    agent, result = run("pass", tmp_path)
    assert result.state is WorkerState.SUCCEEDED and agent.calls.count("start") == 1


def test_all_workers_are_restarted_on_request(tmp_path, monkeypatch):
    def restart(self, worker_group) -> RunResult:
        if self.calls.count("start") == 1:
            self.restart_workers(worker_group)
        return HookedAgent.monitor_workers(self, worker_group)

    monkeypatch.setattr(Recorded, "monitor_workers", restart)
    agent, result = run("pass", tmp_path)
    assert result.state is WorkerState.SUCCEEDED and agent.calls.count("start") == 2


def test_hooks_have_names_that_torchs_agent_does_not_use():
    agent = SimpleNamespace(**dict.fromkeys(dir(HookedAgent.__mro__[1])))
    names = ("start_workers", "stop_workers", "monitor_workers", "worker_processes", "error_files")
    assert not [name for name in names if hasattr(agent, name)]


def test_a_worker_that_has_failed_is_replaced(tmp_path, monkeypatch):
    """The first process fails; its replacement has another variable and succeeds."""
    monitor = Recorded.monitor_workers

    def replace(self, worker_group) -> RunResult:
        if self.worker_processes[0].poll():
            assert self.worker_failure(0).exitcode == 3 and self.worker_environment(0)["RANK"] == "0"
            self.replace_worker(worker_group, 0, self.start_process(0, {"REPLACED": "1"}))
        return monitor(self, worker_group)

    monkeypatch.setattr(Recorded, "monitor_workers", replace)
    agent, result = run("import os; raise SystemExit(0 if 'REPLACED' in os.environ else 3)", tmp_path)
    assert result.state is WorkerState.SUCCEEDED and agent.calls.count("start") == 1
