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
from megalith.checkpoint.writer import ShardWriter, WriteItem, not_saved, shard_bytes_for
from megalith.comm.collectives import Axis, gather_json
from megalith.errors import CheckpointError
from megalith.launch.heartbeat import BACKGROUND
from megalith.optim.moments import Moment
from megalith.parallel.gather import ALONE
from megalith.parallel.shards import LocalShard
from megalith.remote import StorePath, open_location

# How long the ranks that have written wait for the slowest. One that has died is noticed at once all the same.
PATIENCE = timedelta(hours=2)
AFTER_AN_ERROR = 300.0  # seconds that an error in training waits for a save in flight

Share = Callable[[], list[WriteItem]]  # what a rank writes; called when it does


@dataclass(frozen=True)
class Saved:
    """How a save went."""

    folder: Path | StorePath  # where the step stands, if it was saved
    moment: tuple[int, int]  # the run's step and consumed samples
    stalled: float  # seconds that training waited
    seconds: float  # from the beginning to the end
    error: CheckpointError | None  # why it was not saved

    def __str__(self) -> str:
        if self.error is not None:
            return f"warning: {self.error}"
        waited = f"; training waited {self.stalled:.1f} s" if self.stalled < self.seconds else ""
        return f"saved {self.folder} in {self.seconds:.1f} s{waited}"


class Saver:
    """Saves the steps of one run. Every rank has one and calls it alike."""

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
        """`unpadded_rows` gives for each padded parameter the rows that mean something: its rest, and that of its
        optimizer state, is not stored. `write_tokenizer` fills the folder that it is given. With `keep_last`, only
        that many of the steps saved last stay, and those divisible by `keep_every`. After `max_failures` saves in a row
        that have failed, `save` raises.

        For background saves it makes a group of the ranks, so that training's messages do not mix with theirs. Here
        and not at the first save: a rank that is lost while a group is made leaves the others waiting.
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
        self._untold: list[Saved] = []
        self._failures, self._max_failures = 0, max_failures  # the former: in a row
        self._failure: BaseException | None = None
        self.last: Saved | None = None
        """The last save that has ended."""

    def save(
        self,
        record: RunRecord,
        model: Model,
        optimizer: torch.optim.Optimizer | None,
        more: Mapping[str, Mapping[str, LocalShard]] | None = None,
        task_files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Saves a run at this moment into `step_NNNNNNNN`; how it went, `completed_saves` tells.

        `more` are shards of further parts, by part and name; `task_files`, the first rank's, contents by file name.
        In the background it returns when the state is copied, else when the step is whole or has failed. The shapes
        and shards are those of the first save. Without `optimizer` the weights alone are saved.
        Raises CheckpointError, on every rank, where too many saves in a row have failed: in the background when the
        next one begins, because until then a save may have ended on some ranks alone.
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
            self._thread = threading.Thread(target=self._write, args=work, name="checkpoint", daemon=True)
            self._thread.start()

    def completed_saves(self, wait: bool = False) -> list[Saved]:
        """The saves that have ended since the last call, on this rank; with `wait`, after the one in flight has."""
        if wait or (self._thread is not None and not self._thread.is_alive()):
            self._join()
        untold, self._untold = self._untold, []
        return untold

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Lets a save in flight end. After an error no longer than a while: a rank that it needs may be lost."""
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
                f"{self._failures} saves in a row have failed (checkpoint.max_failed_saves), the last one: "
                f"{self.last.error}; make room or mend the storage, and go on from the last whole checkpoint"
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
            self._failure = failure  # a rank is lost, or we are wrong: raised where training is
            return
        seconds = time.monotonic() - begin
        moment = (record.step, record.consumed_samples)
        self._failures = 0 if error is None else self._failures + 1
        self.last = Saved(step.final, moment, seconds if stalled is None else stalled, seconds, error)
        self._untold.append(self.last)


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
    """Saves a run into `checkpoints/step_NNNNNNNN` and returns that folder when it is whole.

    Every rank of `world` calls it with what it holds. The options are those of `Saver`, which one that saves often
    uses. Raises CheckpointError on every rank when the disk refused one; the steps before are then as they were.
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
    """Writes and completes a step; every rank calls it. Raises CheckpointError on all when it failed on one."""
    is_first = world.rank == 0
    own: list[dict] = []

    def write_share() -> None:
        items = share()
        total = sum(item.bytes for item in items)
        with ShardWriter(step.temporary, world.rank, shard_bytes=shard_bytes_for(total)) as shards:
            for item in items:
                shards.add(item)
            own.append(shards.finish())

    try:
        step.join(collectively(world, lambda: step.begin() if is_first else None)[0])
        collectively(world, write_share)
        written = gather_json(own[0], world, to_first=True)
        more = write_tokenizer, task_files
        collectively(world, lambda: step.commit(record, plan.table, written, *more) if is_first else None)
    except BaseException as error:
        if is_first:
            step.abandon()
        if isinstance(error, CollectiveError):
            raise not_saved(step, str(error), plan.total_bytes) from error
        raise


def _share(plan: Plan, shards: StateShards) -> list[WriteItem]:
    return [
        WriteItem(part, name, shard.values, Extent(shard.offset, tuple(shard.values.shape)), shard.shape)
        for part, name in plan.share
        for shard in [shards[part][name]]
    ]


def _staged(share: list[WriteItem], staging: Staging) -> Share:
    """The share's values as they are now; where there is no memory for it, that error when they are asked for."""
    try:
        copies = staging.copy(
            item.values.float() if isinstance(item.values, Moment) else item.values for item in share
        )
    except (RuntimeError, MemoryError) as error:
        refused = error

        def refuse() -> list[WriteItem]:
            raise refused

        return refuse
    staged = [replace(item, values=copy) for item, copy in zip(share, copies)]
    return lambda: staged
