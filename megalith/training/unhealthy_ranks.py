"""Planned replacement of ranks whose hardware is unhealthy (`runtime.replace_unhealthy_ranks`).

A rank is unhealthy if its GPU is slowed by heat or power or has memory errors, or if it is a straggler in two
measurements in a row. At the end of that step, all ranks take a snapshot in memory. The launcher then replaces the rank
as it does after a failure (launch/in_process.py), so no step is repeated. Each rank is replaced once: if its successor
is unhealthy as well, the cause is not the process or its GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.comm.collectives import Axis, gather_json
from megalith.launch.failure import RankLost
from megalith.launch.heartbeat import Heartbeat
from megalith.launch.in_process import InProcessRestart
from megalith.report.report import Report
from megalith.training.run_snapshots import RunSnapshots

STRAGGLES = 2  # consecutive measurements in which a rank is slow


class UnhealthyRanks:
    """Decides which ranks to replace. Every rank makes the same calls.

    Args:
        world: all ranks.
        restart: this process's side of in-process restarts.
        snapshots: the run's snapshots in memory.
        report: the run's report, whose events of GPUs and stragglers are read on rank 0.
        heartbeat: this rank's heartbeat.
        interval: steps between two checks.
    """

    def __init__(
        self,
        world: Axis,
        restart: InProcessRestart,
        snapshots: RunSnapshots,
        report: Report,
        heartbeat: Heartbeat,
        interval: int,
    ):
        self._heartbeat = heartbeat
        self._world, self._restart, self._snapshots, self._report = world, restart, snapshots, report
        self._interval = interval
        self._slow: dict[int, int] = {}  # rank -> consecutive measurements in which it was slow

    def after_step(self, step: int) -> None:
        """Replace unhealthy ranks, if there are any. Returns only if no rank is replaced.

        Raises:
            RankLost: a rank is being replaced; this process continues from memory.
        """
        if step % self._interval:
            return
        planned = {}
        if self._world.rank == 0:
            reasons = self._reasons()
            planned = {str(rank): reasons[rank] for rank in reasons if self._restart.plan_replacement(rank)}
        planned = gather_json(planned, self._world)[0]
        if not planned:
            return
        for rank, reason in planned.items():
            text = f"rank {rank} is unhealthy ({reason}); replacing it after step {step}"
            self._report.event(text, event="planned_replacement", step=step, rank=int(rank))
        self._snapshots.take()
        self._snapshots.pause(self._heartbeat, "replacing")
        if self._world.rank == 0:
            self._restart.request_planned_replacement([int(rank) for rank in planned])
        if self._restart.wait_for_abort():
            raise RankLost(f"rank {', '.join(planned)} is replaced")
        self._heartbeat.end_long("training")
        self._report.event(
            "the launcher has not replaced it, because no restarts are left; training continues",
            event="no_replacement",
            step=step,
        )

    def _reasons(self) -> Mapping[int, str]:
        """Return the reason to replace a rank, by rank. Only rank 0 has all events."""
        reasons: dict[int, str] = {}
        measured, events = self._report.take_hardware_events()
        slow = {event["rank"] for event in events if event["event"] == "straggler"}
        if measured:
            self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in slow}
        for rank, times in self._slow.items():
            if times >= STRAGGLES:
                reasons[rank] = f"slow in {times} measurements in a row"
        for event in events:
            if event["event"] == "gpu" and event["is_hardware"]:
                reasons[event["rank"]] = gpu_reason(event)
        return reasons


def gpu_reason(event: Mapping[str, Any]) -> str:
    """Return a GPU's fault without the advice."""
    return event["text"].rpartition("): ")[2].partition(":")[0]
