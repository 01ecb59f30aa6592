"""Averaged weights, from a checkpoint's optimizer state or as the mean of several checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megalith.checkpoint.extent import Extent
from megalith.checkpoint.files import DTYPES, byte_count, byte_view
from megalith.checkpoint.manifest import RunRecord, TensorRecord
from megalith.checkpoint.read import Checkpoint
from megalith.checkpoint.rewrite import copy_tokenizer, part_bytes, row_blocks
from megalith.checkpoint.state import MODEL, OPTIMIZER
from megalith.checkpoint.steps import CHECKPOINTS
from megalith.checkpoint.store import step_folder
from megalith.checkpoint.writer import ShardWriter, WriteItem, cleanup_on_error
from megalith.errors import CheckpointError, shorten
from megalith.launch.lock import lock_output
from megalith.optim.averages import EMA, Z, average_from_z
from megalith.parallel.shards import LocalShard
from megalith.progress import Progress
from megalith.remote import StorePath


class AveragedCheckpoint(Checkpoint):
    """A checkpoint in which the averages in the optimizer state replace the weights."""

    def fill(self, part: str, shards: Mapping[str, LocalShard], progress: Progress | None = None) -> None:
        if part != MODEL:
            return super().fill(part, shards, progress)
        table = self.table(OPTIMIZER)
        averages = {name: f"optim.{name}.{EMA}" for name in shards if f"optim.{name}.{EMA}" in table}
        super().fill(OPTIMIZER, {averages[name]: shards[name] for name in averages}, progress)
        super().fill(MODEL, {name: shard for name, shard in shards.items() if name not in averages}, progress)
        for name, shard in shards.items():
            key = f"optim.{name}.{Z}"
            if name not in averages and key in table:
                z = torch.empty_like(shard.values)
                super().fill(OPTIMIZER, {key: replace(shard, values=z)})
                shard.values.copy_(
                    average_from_z(shard.values, z, self.manifest.config["optim"]["adam_beta1"])
                )


def with_average(checkpoint: Checkpoint) -> tuple[Checkpoint, bool]:
    """Return (checkpoint with its averaged weights, True), or (the checkpoint itself, False) if it has no averages."""
    names = checkpoint.manifest.tensors.get(OPTIMIZER, {})
    if not any(name.endswith((f".{EMA}", f".{Z}")) for name in names):
        return checkpoint, False
    return AveragedCheckpoint(checkpoint.folder, checkpoint.manifest, checkpoint.files), True


@dataclass(frozen=True)
class MeanValues:
    """A box of the mean of one tensor over several checkpoints. It is computed when it is written. Implements
    TensorSource.
    """

    checkpoints: Sequence[Checkpoint]
    name: str
    extent: Extent
    progress: Progress

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.checkpoints[-1].table(MODEL)[self.name].dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.extent.shape

    def byte_chunks(self) -> Iterator[Tensor]:
        """Yield the bytes of the mean, computed in fp64, in blocks of several rows (a few megabytes).

        Integer tensors are not averaged; they come from the last checkpoint.
        """
        for block in row_blocks(self.extent, self.dtype):
            values = [checkpoint.read(MODEL, self.name, block) for checkpoint in self.checkpoints]
            if self.dtype.is_floating_point:
                mean = torch.stack([value.double() for value in values]).mean(0).to(self.dtype)
            else:
                mean = values[-1]
            self.progress.add(byte_count(block.shape, self.dtype))
            yield byte_view(mean)


def average(
    checkpoints: Sequence[Checkpoint], output: Path | StorePath, show_progress: bool = True
) -> Path | StorePath:
    """Write the mean of the weights of `checkpoints` to a step in `output`/checkpoints. Return its folder.

    The step has the record of the last checkpoint and no optimizer state.

    Raises:
        CheckpointError: the checkpoints hold different tensors or adapters of different bases, or the step exists.
        ConfigError: a run is using the folder.
    """
    last = checkpoints[-1]
    for checkpoint in checkpoints:
        _check_same(checkpoint, last)
    step = step_folder(output / CHECKPOINTS, last.manifest.step)
    with lock_output(output), cleanup_on_error(step):
        if step.final.exists():
            raise CheckpointError(f"{step.final} already exists; choose another output folder")
        step.begin()
        table = last.table(MODEL)
        with (
            Progress("average", part_bytes(last, MODEL), show=show_progress) as progress,
            ShardWriter(step.temporary, shard_bytes=2**63) as shards,
        ):
            for name, stored in table.items():
                extent = Extent.full(stored.shape)
                values = MeanValues(checkpoints, name, extent, progress)
                shards.add(WriteItem(MODEL, name, values, extent, tuple(stored.shape)))
            written = shards.finish()
        fields = set(RunRecord.model_fields) - {"abandoned"}
        record = RunRecord.model_validate(last.manifest.model_dump(include=fields))
        records = {
            name: TensorRecord(dtype=stored.dtype, shape=stored.shape) for name, stored in table.items()
        }
        tokenizer = last.tokenizer_folder and partial(copy_tokenizer, last)
        step.commit(record, {MODEL: records}, [written], tokenizer, {})
    return step.final


def _check_same(checkpoint: Checkpoint, last: Checkpoint) -> None:
    ours, theirs = ({n: (t.dtype, t.shape) for n, t in c.table(MODEL).items()} for c in (checkpoint, last))
    others = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if others:
        raise CheckpointError(
            f"{checkpoint.folder} and {last.folder} do not have the same tensors: {shorten(others)}; average "
            "checkpoints of one model"
        )
    if checkpoint.manifest.base != last.manifest.base:
        raise CheckpointError(
            f"{checkpoint.folder} and {last.folder} have adapters of different base weights; "
            "average adapters of one base"
        )
