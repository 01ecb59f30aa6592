"""Rewrites a step to another number of files, or merges it into one file.

Tensors are copied some megabytes at a time, so memory use does not depend on the checkpoint's size.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megalith.checkpoint.extent import Extent
from megalith.checkpoint.files import CHUNK, DTYPES, byte_count, byte_view, stored_bytes, write_safetensors
from megalith.checkpoint.manifest import RunRecord, StoredTensor, TensorRecord
from megalith.checkpoint.read import Checkpoint, is_tokenizer_file
from megalith.checkpoint.steps import CHECKPOINTS
from megalith.checkpoint.store import StepFolder, step_folder
from megalith.checkpoint.writer import ShardWriter, WriteItem, cleanup_on_error
from megalith.errors import CheckpointError
from megalith.io import atomic_path, make_folder
from megalith.launch.lock import lock_output
from megalith.progress import Progress
from megalith.remote import StorePath


@dataclass(frozen=True)
class StoredValues:
    """A box of a checkpoint tensor that is read when it is written elsewhere.

    Implements TensorSource; `progress` counts its bytes.
    """

    checkpoint: Checkpoint
    part: str
    name: str
    extent: Extent
    progress: Progress | None = None

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.checkpoint.table(self.part)[self.name].dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.extent.shape

    def blocks(self) -> Iterator[Tensor]:
        """Yield the values in blocks of rows of a few megabytes."""
        for block in row_blocks(self.extent, self.dtype):
            yield self.checkpoint.read(self.part, self.name, block)
            if self.progress is not None:
                self.progress.add(byte_count(block.shape, self.dtype))

    def byte_chunks(self) -> Iterator[Tensor]:
        return map(byte_view, self.blocks())


def stored_values(
    checkpoint: Checkpoint, part: str, progress: Progress | None = None
) -> dict[str, StoredValues]:
    """Return the full tensors of a checkpoint part by name, which are read on use. `progress` counts their bytes."""
    return {
        name: StoredValues(checkpoint, part, name, Extent.full(stored.shape), progress)
        for name, stored in checkpoint.table(part).items()
    }


def part_bytes(checkpoint: Checkpoint, part: str | None = None) -> int:
    """Return the size of a checkpoint part's tensors in bytes. None means all parts."""
    parts = checkpoint.manifest.tensors if part is None else [part]
    return sum(stored_bytes(stored) for each in parts for stored in checkpoint.table(each).values())


def row_blocks(extent: Extent, dtype: torch.dtype) -> Iterator[Extent]:
    """Divide the box along its first dimension into blocks of at most CHUNK bytes, or single rows if these are
    longer."""
    if not extent.shape or extent.volume == 0:
        yield extent
        return
    rows = max(1, CHUNK // byte_count(extent.shape[1:], dtype))
    for start in range(0, extent.shape[0], rows):
        yield _rows(extent, start, min(rows, extent.shape[0] - start))


def reshard(
    checkpoint: Checkpoint, output: Path | StorePath, files: int, show_progress: bool = True
) -> Path | StorePath:
    """Write the step to `output`/checkpoints with `files` files per checkpoint part. Returns its folder.

    File r contains the r-th part of each tensor's rows, which is what rank r reads if the state is sharded over
    `files` ranks.

    Raises:
        CheckpointError: the step already exists or cannot be written.
        ConfigError: a run is using the folder.
    """
    manifest = checkpoint.manifest
    step = step_folder(output / CHECKPOINTS, manifest.step)
    with lock_output(output), cleanup_on_error(step):
        if step.final.exists():
            raise CheckpointError(f"{step.final} already exists; choose another output folder")
        step.begin()
        with Progress("reshard", part_bytes(checkpoint), show=show_progress) as progress:
            written = [_write_share(checkpoint, step, rank, files, progress) for rank in range(files)]
        fields = set(RunRecord.model_fields) - {"abandoned"}  # save numbers of the other folder
        record = RunRecord.model_validate(manifest.model_dump(include=fields))
        table = {
            part: {
                name: TensorRecord(dtype=stored.dtype, shape=stored.shape) for name, stored in named.items()
            }
            for part, named in manifest.tensors.items()
        }
        tokenizer = checkpoint.tokenizer_folder and partial(copy_tokenizer, checkpoint)
        task_files = {name: path.read_bytes() for name, path in checkpoint.task_files.items()}
        step.commit(record, table, written, tokenizer, task_files)
    return step.final


def merge(checkpoint: Checkpoint, part: str, path: Path, show_progress: bool = True) -> None:
    """Write the tensors of a checkpoint part to one file: `.safetensors`, or `.bin` or `.pt` by torch.save of a dict.

    For `.bin` and `.pt`, the complete part must fit in memory. Raises CheckpointError for another suffix and if the
    disk is full.
    """
    if path.suffix not in (".safetensors", ".bin", ".pt"):
        raise CheckpointError(
            f"the suffix of {path.name} is not supported; use .safetensors, or .bin or .pt for torch.save"
        )
    try:
        make_folder(path.parent)
        total = part_bytes(checkpoint, part)
        with (
            atomic_path(path) as temporary,
            Progress("merge", total, show=show_progress) as progress,
        ):
            if path.suffix == ".safetensors":
                write_safetensors(temporary, stored_values(checkpoint, part, progress))
            else:
                tensors = {}
                for name, tensor in checkpoint.tensors(part):
                    tensors[name] = tensor
                    progress.add(tensor.nbytes)
                torch.save(tensors, temporary)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError if the disk is full
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path} could not be written: {reason}") from error


def copy_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy the tokenizer's files that the manifest lists, and no others, because a link could lead out of the
    checkpoint."""
    for name in filter(is_tokenizer_file, checkpoint.manifest.files):
        source = checkpoint.files / name
        target = folder / source.relative_to(checkpoint.tokenizer_folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def _write_share(checkpoint: Checkpoint, step: StepFolder, rank: int, files: int, progress: Progress) -> dict:
    with ShardWriter(step.temporary, rank, shard_bytes=2**63) as shards:
        for part, named in checkpoint.manifest.tensors.items():
            for number, (name, stored) in enumerate(named.items()):
                extent = _share(stored, number, rank, files)
                values = StoredValues(checkpoint, part, name, extent, progress)
                shards.add(WriteItem(part, name, values, extent, tuple(stored.shape)))
        return shards.finish()


def _share(stored: StoredTensor, number: int, rank: int, files: int) -> Extent:
    full = Extent.full(stored.shape)
    if not stored.shape:  # scalars are distributed round robin
        return full if number % files == rank else Extent((0,), (0,))
    rows = -(-stored.shape[0] // files)
    start = min(rank * rows, stored.shape[0])
    return _rows(full, start, min(rows, stored.shape[0] - start))


def _rows(extent: Extent, start: int, count: int) -> Extent:
    return Extent((extent.offset[0] + start, *extent.offset[1:]), (count, *extent.shape[1:]))
