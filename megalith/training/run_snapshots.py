"""Snapshots of a run in host memory: the state other than tensors, and how a new run continues from them."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path

from megalith.checkpoint import RunRecord, state_shards
from megalith.checkpoint.memory_snapshots import MemorySnapshots, Shards, Snapshot, fill
from megalith.checkpoint.state import AMAXES, amax_shards
from megalith.comm.collectives import gather_json
from megalith.config import RunConfig
from megalith.errors import ConfigError
from megalith.io import replace_file
from megalith.launch.heartbeat import Heartbeat
from megalith.training.run_state import Run, Task


def restarts_in_process(config: RunConfig, task: Task) -> bool:
    """Return True if the run keeps snapshots in memory. Raise ConfigError if its task does not support that."""
    if config.checkpoint.memory_interval is None:
        if config.runtime.replace_unhealthy_ranks:
            raise ConfigError(
                "runtime.replace_unhealthy_ranks is true, but ranks are replaced from snapshots in memory; set "
                "checkpoint.memory_interval to the number of steps between snapshots"
            )
        return False
    if not task.restarts_in_process:
        raise ConfigError(
            f"checkpoint.memory_interval is {config.checkpoint.memory_interval}, but a restart in the same processes "
            "does not support this task, which has other processes or models; leave checkpoint.memory_interval out"
        )
    return True


class RunSnapshots:
    """Snapshots of one run. Every rank makes the same calls.

    Args:
        run: the run.
        snapshots: this process's memory, which may contain snapshots of the same job's earlier run.

    Attributes:
        restored_step: step of the snapshot that the run was restored from, or None.
    """

    def __init__(self, run: Run, snapshots: MemorySnapshots):
        self._run, self._snapshots = run, snapshots
        self.restored_step: int | None = None

    def take(self) -> None:
        """Take a snapshot of the current state. Log snapshots that have failed."""
        run = self._run
        record = run.record().model_copy(update={"config": {}})
        files = {
            name: base64.b64encode(content).decode() for name, content in run.task.state_files(run).items()
        }
        description = {"step": run.step, "record": record.model_dump(mode="json"), "files": files}
        self._snapshots.take(description, self._shards())
        for result in self._snapshots.results():
            if result.error:
                run.log(f"warning: no snapshot of step {result.step} in memory: {result.error}")

    def before_update(self) -> None:
        """Wait until the snapshot in progress has copied the state that the optimizer is about to change."""
        self._snapshots.before_update()

    def wait(self) -> None:
        """Wait for the snapshot in progress. Call it before the process groups are destroyed."""
        self._snapshots.wait()

    def pause(self, heartbeat: Heartbeat, phase: str) -> None:
        """Wait until the last snapshot is complete on every rank, in a phase that the hang watch does not limit."""
        self.wait()
        gather_json(None, self._run.mesh.world)
        heartbeat.begin_long(phase)

    def newest(self) -> Snapshot | None:
        """Return this rank's shards of the newest snapshot that all ranks can restore, or None if there is none."""
        world = self._run.mesh.world
        while (serial := self._snapshots.find(world)) is not None:
            if (snapshot := self._snapshots.fetch(serial, world, self._shards())) is not None:
                return snapshot
        return None

    def restore(self, snapshot: Snapshot) -> None:
        """Restore the run's state."""
        run = self._run
        shards, amaxes = self._shards(), run.model.amaxes
        fill(snapshot, shards)
        if AMAXES in shards:
            amaxes.load_state(shards[AMAXES], lambda name: shards[AMAXES][name].values)
        description = snapshot.description
        record = RunRecord.model_validate(description["record"])
        run.restore_record(record)
        run.abandoned = record.abandoned
        files = gather_json(description["files"], run.mesh.world)[0]
        with tempfile.TemporaryDirectory(prefix="megalith-") as folder:
            for name, content in files.items():
                replace_file(Path(folder) / name, base64.b64decode(content))
            run.task.load_state(run, {name: Path(folder) / name for name in files})
        self.restored_step = run.step

    def _shards(self) -> Shards:
        """Return this rank's shards of the state, including padding."""
        run = self._run
        more = amax_shards(run.model.amaxes, run.mesh.world) | run.task.parts(run)
        return state_shards(run.model.chunks, run.optimizer) | more
