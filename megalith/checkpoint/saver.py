"""Saving a run from all its ranks, at once or in the background.

Each rank writes its share (plan.py) into files of its own. The first rank creates the folder before that and commits
the step after it (store.py). Between these phases the ranks exchange errors (agree.py): if one rank cannot write, all
learn of it, the folder is removed, and the earlier steps stay unchanged.

In the background, training waits only for a copy in host memory (staging.py), and a thread does the rest. One save is
in flight at a time; the next one waits for it. A step gets its final name, and `latest` points to it, only after all of
it is on the disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megalith.checkpoint.agree import CollectiveError, collectively
from megalith.checkpoint.extent import Extent
from megalith.checkpoint.manifest import RunRecord
from megalith.checkpoint.plan import Plan, StateShards, make_plan
from megalith.checkpoint.staging import Staging
from megalith.checkpoint.state import Model, state_shards
from megalith.checkpoint.store import StepFolder, step_folder
from megalith.checkpoint.writer import ShardWriter, WriteItem, save_error, shard_bytes_for
from megalith.comm.collectives import Axis, gather_json
from megalith.errors import CheckpointError
from megalith.launch.heartbeat import BACKGROUND
from megalith.optim.moments import Moment
from megalith.parallel.gather import ALONE
from megalith.parallel.shards import LocalShard
from megalith.remote import StorePath, open_location

# Time that ranks wait for the slowest writer. A rank that has died is noticed at once.
PATIENCE = timedelta(hours=2)
AFTER_AN_ERROR = 300.0  # seconds to wait for a save in progress after an error in training

SAVER_THREAD = "checkpoint"  # name of the thread of a background save

Share = Callable[[], list[WriteItem]]  # a rank's items; called when they are written


@dataclass(frozen=True)
class SaveResult:
    """Result of a save."""

    folder: Path | StorePath  # the step, if it was saved
    moment: tuple[int, int]  # the run's step and consumed samples
    stalled: float  # seconds that training waited
    seconds: float  # total duration
    error: CheckpointError | None  # reason for failure

    def __str__(self) -> str:
        if self.error is not None:
            return f"warning: {self.error}"
        waited = f"; training waited {self.stalled:.1f} s" if self.stalled < self.seconds else ""
        return f"saved {self.folder} in {self.seconds:.1f} s{waited}"


class Saver:
    """Saves the steps of one run. Every rank has one and makes the same calls."""

    def __init__(
        self,
        checkpoints: str | Path | StorePath,
        world: Axis = ALONE,
        *,
        unpadded_rows: Mapping[str, int] | None = None,
        write_tokenizer: Callable[[Path], None] | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        background: bool = False,
        max_failures: int | None = None,
    ):
        """Prepare to save. Collective for background saves, which get a process group of their own.

        Their messages then do not mix with training's. The group is created here and not at the first save, because a
        rank that is lost during its creation would leave the others waiting.

        Args:
            checkpoints: folder or URL of the steps.
            world: all ranks.
            unpadded_rows: number of rows without padding of each padded parameter. The padding is not stored, neither
                in weights nor in optimizer state.
            write_tokenizer: function that writes the tokenizer into the folder passed to it.
            keep_last: number of most recent steps to keep. None means all.
            keep_every: also keep steps divisible by this number.
            background: save in a thread.
            max_failures: consecutive failed saves after which `save` raises.
        """
        if background and world.size > 1:
            group = dist.new_group(backend="gloo", timeout=PATIENCE, group_desc=BACKGROUND)
            world = Axis(world.size, world.rank, group)
        self._checkpoints, self._world = open_location(checkpoints), world
        self._rows, self._write_tokenizer = unpadded_rows or {}, write_tokenizer
        self._keep_last, self._keep_every = keep_last, keep_every
        self._staging = Staging() if background else None
        self._plan: Plan | None = None
        self._thread: threading.Thread | None = None
        self._unreported: list[SaveResult] = []
        self._failures, self._max_failures = 0, max_failures  # consecutive failures
        self._failure: BaseException | None = None
        self.last: SaveResult | None = None
        """Result of the last completed save."""
        self.has_saved = False
        """True on rank 0 once it has completed a step, even if the ranks were lost before they could agree on that."""

    def save(
        self,
        record: RunRecord,
        model: Model,
        optimizer: torch.optim.Optimizer | None,
        more: Mapping[str, Mapping[str, LocalShard]] | None = None,
        task_files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Save the run's current state as `step_NNNNNNNN`. `completed_saves` reports the result.

        Returns when the step is complete or has failed. A background save returns when the state is copied.

        Args:
            record: the run's state besides tensors.
            model: the model, or the chunks of a pipeline rank. Shapes and sharding must be the same at every save.
            optimizer: None saves only the weights.
            more: shards of further parts, by part and name.
            task_files: contents by file name; rank 0's are saved.

        Raises:
            CheckpointError: on every rank, after too many consecutive failures. Background saves raise it at the
                start of the next save, because until then only some ranks may know of the failure.
        """
        begin = time.monotonic()
        self._join()
        self._require_some_success()
        world = self._world
        shards = state_shards(model, optimizer, self._rows) | dict(more or {})
        if self._plan is None:
            self._plan = make_plan(shards, world)
        share = _share(self._plan, shards)
        step = step_folder(self._checkpoints, record.step)
        files = dict(task_files or {})
        if self._staging is None:
            self._write(step, record, lambda: share, files, world, begin, None)
            self._join()
            self._require_some_success()
        else:
            staged = _staged(share, self._staging)
            work = (step, record, staged, files, world, begin, time.monotonic() - begin)
            self._thread = threading.Thread(target=self._write, args=work, name=SAVER_THREAD, daemon=True)
            self._thread.start()

    def completed_saves(self, wait: bool = False) -> list[SaveResult]:
        """Return the saves completed since the last call, on this rank. With `wait`, wait for the one in progress."""
        if wait or (self._thread is not None and not self._thread.is_alive()):
            self._join()
        completed, self._unreported = self._unreported, []
        return completed

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Wait for the save in progress. After an error, wait at most AFTER_AN_ERROR seconds, because a rank that the
        save needs may be lost.
        """
        if kind is None:
            self._join()
        elif self._thread is not None:
            self._thread.join(AFTER_AN_ERROR)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _require_some_success(self) -> None:
        if self._max_failures is not None and self._failures >= self._max_failures:
            raise CheckpointError(
                f"{self._failures} consecutive saves have failed (checkpoint.max_failed_saves), the last one: "
                f"{self.last.error}; free space or repair the storage, and resume from the last complete checkpoint"
            )

    def _write(
        self,
        step: StepFolder,
        record: RunRecord,
        share: Share,
        task_files: Mapping[str, bytes],
        world: Axis,
        begin: float,
        stalled: float | None,
    ) -> None:
        error = None
        try:
            write_step(step, record, self._plan, share, world, self._write_tokenizer, task_files)
            if world.rank == 0:
                step.delete_old_steps(self._keep_last, self._keep_every)
        except CheckpointError as failure:
            error = failure
        except BaseException as failure:
            self._failure = failure  # a lost rank or a bug; raised in the training thread
            return
        finally:
            self.has_saved = self.has_saved or step.is_complete
        seconds = time.monotonic() - begin
        moment = (record.step, record.consumed_samples)
        self._failures = 0 if error is None else self._failures + 1
        self.last = SaveResult(step.final, moment, seconds if stalled is None else stalled, seconds, error)
        self._unreported.append(self.last)


def save_checkpoint(
    checkpoints: str | Path | StorePath,
    record: RunRecord,
    model: Model,
    optimizer: torch.optim.Optimizer | None,
    more: Mapping[str, Mapping[str, LocalShard]] | None = None,
    *,
    world: Axis = ALONE,
    unpadded_rows: Mapping[str, int] | None = None,
    write_tokenizer: Callable[[Path], None] | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
) -> Path | StorePath:
    """Save a run in `checkpoints/step_NNNNNNNN`. Collective over `world`; each rank passes its shards.

    Takes the arguments of `Saver`. To save repeatedly, use `Saver` itself.

    Returns:
        The step's folder, once it is complete.

    Raises:
        CheckpointError: on every rank, if one could not write. Earlier steps are unchanged.
    """
    saver = Saver(
        checkpoints,
        world,
        unpadded_rows=unpadded_rows,
        write_tokenizer=write_tokenizer,
        keep_last=keep_last,
        keep_every=keep_every,
    )
    saver.save(record, model, optimizer, more)
    (saved,) = saver.completed_saves()
    if saved.error is not None:
        raise saved.error
    return saved.folder


def write_step(
    step: StepFolder,
    record: RunRecord,
    plan: Plan,
    share: Share,
    world: Axis,
    write_tokenizer: Callable[[Path], None] | None,
    task_files: Mapping[str, bytes] | None = None,
) -> None:
    """Write and commit a step. Collective over all ranks. Raises CheckpointError on all ranks if one fails."""
    is_first = world.rank == 0
    finished: list[dict] = []

    def write_share() -> None:
        items = share()
        total = sum(item.bytes for item in items)
        with ShardWriter(step.temporary, world.rank, shard_bytes=shard_bytes_for(total)) as shards:
            for item in items:
                shards.add(item)
            finished.append(shards.finish())

    try:
        step.use_folder(collectively(world, lambda: step.begin() if is_first else None)[0])
        collectively(world, write_share)
        written = gather_json(finished[0], world, to_first=True)
        files = write_tokenizer, task_files
        collectively(world, lambda: step.commit(record, plan.table, written, *files) if is_first else None)
    except BaseException as error:
        if is_first:
            step.abandon()
        if isinstance(error, CollectiveError):
            raise save_error(step, str(error), plan.total_bytes) from error
        raise


def _share(plan: Plan, shards: StateShards) -> list[WriteItem]:
    return [
        WriteItem(part, name, shard.values, Extent(shard.offset, tuple(shard.values.shape)), shard.shape)
        for part, name in plan.share
        for shard in [shards[part][name]]
    ]


def _staged(share: list[WriteItem], staging: Staging) -> Share:
    """Copy the values now. Return a function that returns the copies, or raises an error if there was not enough
    memory.
    """
    try:
        copies = staging.copy(
            item.values.float() if isinstance(item.values, Moment) else item.values for item in share
        )
    except (RuntimeError, MemoryError) as error:
        failure = error

        def fail() -> list[WriteItem]:
            raise failure

        return fail
    staged = [replace(item, values=copy) for item, copy in zip(share, copies)]
    return lambda: staged
