"""Growth of a running job: after a snapshot, the ranks of new machines join, and the job's ranks continue in their
processes.

Rank 0 learns from the launcher how many ranks the job would have. If the layout allows that number, all ranks complete
their snapshot and let the launchers resize the job (launch/restart_store.py), so no step is repeated.
"""

from __future__ import annotations

from megalith.comm.collectives import Axis, gather_json
from megalith.config import RunConfig
from megalith.errors import ConfigError
from megalith.launch.failure import RankLost
from megalith.launch.heartbeat import Heartbeat
from megalith.launch.in_process import InProcessRestart
from megalith.parallel.pipeline.pipeline_rules import check_layout
from megalith.report.report import Report
from megalith.tables import counted
from megalith.training.run_snapshots import RunSnapshots


class GrowingJob:
    """Decides when the waiting machines join a job. Every rank makes the same calls.

    Args:
        config: the run's configuration.
        world: all ranks.
        restart: this process's side of in-process restarts.
        snapshots: the run's snapshots in memory.
        report: the run's report.
        heartbeat: this rank's heartbeat.
    """

    def __init__(
        self,
        config: RunConfig,
        world: Axis,
        restart: InProcessRestart,
        snapshots: RunSnapshots,
        report: Report,
        heartbeat: Heartbeat,
    ):
        self._config, self._world, self._restart = config, world, restart
        self._snapshots, self._report, self._heartbeat = snapshots, report, heartbeat
        self._rejected = 0  # number of ranks that the layout forbids

    def after_snapshot(self, step: int) -> None:
        """Let the waiting machines join the job. Returns only if the job is not resized.

        Raises:
            RankLost: the job is being resized; this process continues from memory.
        """
        size = gather_json(self._allowed_size() if self._world.rank == 0 else 0, self._world)[0]
        if not size:
            return
        text = f"machines have joined: continuing with {counted(size, 'rank')} after step {step}"
        self._report.event(text, event="grow", step=step, ranks=size)
        self._snapshots.pause(self._heartbeat, "growing")
        if self._world.rank == 0:
            self._restart.request_resize()
        if self._restart.wait_for_abort():
            raise RankLost("the job is being resized")
        self._heartbeat.end_long("training")

    def _allowed_size(self) -> int:
        """Return the number of ranks after the waiting machines have joined. 0 if no machine waits or the layout does
        not allow the number.
        """
        size = self._restart.invited()
        if size <= self._world.size or size == self._rejected:
            return 0
        try:
            check_layout(self._config, size)
        except ConfigError as error:
            self._rejected = size
            self._report.note(
                f"machines wait to join, but the job cannot have {counted(size, 'rank')}: {error}"
            )
            return 0
        return size
